"""Publishes changes of the prefix caches over ZeroMQ, in a separate thread. Only this module imports ZeroMQ.

The PUB socket sends ``[topic, sequence number, payload]``. The ROUTER socket repeats earlier batches: a request ``[b"",
first sequence number]`` gets ``[b"", sequence number, payload]`` for each batch that is still in memory, and at the end
``[b"", END, b""]``. A sequence number has 8 bytes in big-endian order. The messages are the same as vLLM's, so programs
that subscribe to vLLM understand them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Thread
from typing import Any

import zmq

from llm_serving.config.events_section import KvEventsConfig
from llm_serving.errors import ConfigError
from llm_serving.kvevents.observer import Change, ChangeQueue, ReplicaObserver, events_of
from llm_serving.kvevents.wire import encoder

END = (-1).to_bytes(8, "big", signed=True)
"""Marks the end of a replay. The last message has this value instead of a sequence number."""
_MAX_BATCH = 4096
"""Maximum number of changes in one published message."""
_LINGER_MS = 200
"""Maximum milliseconds that a stopping publisher waits until its last messages are sent."""
_COLLECT_MS = 20
"""Milliseconds for which the thread collects changes before it sends them as one batch."""
_QUIET_ROUNDS = 50
"""After this number of rounds of ``_COLLECT_MS`` without a change, the thread sleeps until the next change.

Waking this thread costs time in the engine thread. So this thread sleeps only if changes are rare.
"""


class EventPublisher:
    """Sends the changes of all replicas. ``close`` ends the thread.

    ``count_dropped`` is called with the number of changes that were lost because the queue was full.
    """

    def __init__(self, settings: KvEventsConfig, count_dropped: Callable[[int], None]) -> None:
        """Raises ConfigError if an endpoint cannot be used."""
        self._topic = (settings.topic or "").encode()
        self._encode = encoder(settings.format)
        self._count_dropped = count_dropped
        self._queue = ChangeQueue(settings.max_waiting_events)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=settings.buffer_batches)
        """The last batches that were sent, each with its sequence number, for replays."""
        self._observers: dict[int, ReplicaObserver] = {}
        """The observer of each replica whose changes are published. Only the thread that creates the publisher uses
        this dict.
        """
        self._sequence = 0
        self._num_counted = 0
        self._is_closing = False
        self._context = zmq.Context()
        try:
            self._pub = self._socket(zmq.PUB, "endpoint", settings.endpoint, settings.buffer_batches)
            self._replay = None
            if settings.replay_endpoint is not None:
                # ZeroMQ limits the number of unread messages to a subscriber. A subscriber reports the messages that it
                # has read only after each half of the limit. So ZeroMQ may count almost half of the limit as unread
                # although it has been read. A whole replay must fit into the other half.
                limit = 2 * (settings.buffer_batches + 1)
                self._replay = self._socket(zmq.ROUTER, "replay_endpoint", settings.replay_endpoint, limit)
        except ConfigError:
            self._context.destroy(linger=0)
            self._queue.close()
            raise
        sockets = [self._pub] if self._replay is None else [self._pub, self._replay]
        self.endpoints = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in sockets]
        """The addresses of the sockets, with the ports that the system has chosen for port 0."""
        self._thread = Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    def observer(self, replica: int) -> ReplicaObserver:
        """Returns an observer for a replica of a new engine.

        It publishes nothing before ``enter_service``. Until then, the observer of the earlier engine publishes.
        """
        return ReplicaObserver(self._queue, replica, self._take_over)

    def close(self, timeout_s: float = 2.0) -> None:
        """Sends the changes that wait, for at most ``timeout_s`` seconds, and ends the thread."""
        for observer in self._observers.values():
            observer.is_current = False
        self._is_closing = True
        self._queue.wake()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._queue.close()

    def _take_over(self, observer: ReplicaObserver) -> None:
        earlier = self._observers.get(observer.replica)
        if earlier is not None:
            earlier.is_current = False
        if not self._is_closing:
            self._observers[observer.replica] = observer
            observer.begin()

    def _socket(self, kind: int, key: str, endpoint: str, high_water_mark: int) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(high_water_mark)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"kv_events_config.{key} = {endpoint!r} cannot be used: {error.strerror}") from error
        return socket

    def _run(self) -> None:
        """Sends batches and answers replays until ``close`` is called and no change waits."""
        poller, queue = zmq.Poller(), self._queue
        poller.register(queue.wakes, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        num_quiet = 0
        while not (self._is_closing and queue.is_empty):
            if num_quiet < _QUIET_ROUNDS:
                poller.poll(_COLLECT_MS)
            elif queue.note_sleep():
                poller.poll()
            queue.note_awake()
            if self._replay is not None:
                self._answer_replays()
            num_quiet = 0 if self._publish() else num_quiet + 1
        self._context.destroy(linger=_LINGER_MS)

    def _publish(self) -> bool:
        """Sends the changes that wait. Consecutive changes of one replica form a batch. Returns True if there were
        changes.
        """
        if self._queue.is_empty:
            return False
        batch: list[Change] = []
        replica = 0
        for taken in self._queue.take(_MAX_BATCH):
            if taken is None or taken[0] != replica:
                self._send(batch, replica)
                batch = []
            if taken is None:
                # Skip a sequence number. The gap shows subscribers that events were lost. Lost events cannot be
                # replayed.
                self._sequence += 1
                continue
            replica = taken[0]
            batch.append(taken[1])
        self._send(batch, replica)
        if (dropped := self._queue.num_dropped - self._num_counted) > 0:
            self._num_counted += dropped
            self._count_dropped(dropped)
        return True

    def _send(self, batch: list[Change], replica: int) -> None:
        if not batch:
            return
        payload, sequence = self._encode(time.time(), events_of(batch), replica), self._sequence
        self._sequence += 1
        self._sent.append((sequence, payload))
        self._pub.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))

    def _answer_replays(self) -> None:
        """Sends earlier batches again to each subscriber that asks for them. A malformed request gets no answer."""
        assert self._replay is not None
        while self._replay.poll(0):
            request = self._replay.recv_multipart()
            if len(request) != 3 or len(request[2]) != 8:
                continue
            client, first = request[0], int.from_bytes(request[2], "big")
            for sequence, payload in self._sent:
                if sequence >= first:
                    self._replay.send_multipart((client, b"", sequence.to_bytes(8, "big"), payload))
            self._replay.send_multipart((client, b"", END, b""))
