"""The agent's socket side: accepts the server, proves and checks the launch secret, reads frames, feeds the queue.

One thread runs ``AgentServer.serve``; it never touches the device, so ``Status`` is answered and the end of the
server noticed while a step runs. Whoever connects without the secret is turned away and disturbs nobody.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass

import psutil

from agent.task_queue import TaskQueue
from llm_serving.errors import ProtocolError
from llm_serving.ipc import messages
from llm_serving.ipc.channel import Channel
from llm_serving.ipc.exchange import ExchangeLayout, ExchangeMemory
from llm_serving.ipc.messages import NONCE_BYTES, AgentMessage, ServerMessage, StepDone
from llm_serving.ipc.shm import SlotLimits, SlotMemory

logger = logging.getLogger("agent.server")

HANDSHAKE_TIMEOUT_S = 5.0
MAX_PENDING_CONNECTIONS = 16


@dataclass(slots=True)
class _Stranger:
    """A connection that has not proved the secret yet."""

    channel: Channel
    nonce: bytes
    deadline: float


class AgentServer:
    """Owns the listening socket, the connection to the server, the mappings of the step slots and of the exchange."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: bytes,
        rank: int,
        limits: SlotLimits,
        queue: TaskQueue,
        exchange: ExchangeLayout | None = None,
    ) -> None:
        """``exchange``: of this agent's group; None for an agent alone."""
        self._listener = listener
        self._secret = secret
        self._rank = rank
        self._limits = limits
        self._queue = queue
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[int, _Stranger] = {}
        self._server: Channel | None = None
        self._send_lock = threading.Lock()
        self._connected = threading.Event()
        self._exchange_layout = exchange
        self.memory: SlotMemory | None = None
        self.exchange: ExchangeMemory | None = None

    def serve(self) -> None:
        """Read frames until the server is gone, then end the process: an agent without its server is nothing."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in self._selector.select(timeout=self._next_timeout()):
                    self._handle(key.fileobj)
                self._drop_late_strangers()
        except (ProtocolError, OSError) as error:
            logger.error("the connection to the server is lost: %s", error)
            os._exit(1)

    def wait_until_connected(self) -> SlotMemory:
        """Block until the server has proved itself and the step slots are mapped."""
        self._connected.wait()
        assert self.memory is not None
        return self.memory

    def send(self, message: AgentMessage) -> None:
        """Send a message to the server. Thread-safe. A server that is gone is noticed by ``serve``."""
        with self._send_lock, contextlib.suppress(OSError):
            assert self._server is not None
            self._server.send(messages.encode(message))

    def _handle(self, source: object) -> None:
        if source is self._listener:
            self._accept()
        elif source is self._server:
            self._read_server()
        else:
            assert isinstance(source, Channel)
            self._read_stranger(self._strangers[source.fileno()])

    def _next_timeout(self) -> float | None:
        if not self._strangers:
            return None
        return max(0.0, min(stranger.deadline for stranger in self._strangers.values()) - time.monotonic())

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        if self._server is not None or len(self._strangers) >= MAX_PENDING_CONNECTIONS:
            connection.close()
            return
        connection.setblocking(True)
        channel = Channel(connection)
        channel.set_timeout(HANDSHAKE_TIMEOUT_S)
        stranger = _Stranger(channel, secrets.token_bytes(NONCE_BYTES), time.monotonic() + HANDSHAKE_TIMEOUT_S)
        self._strangers[channel.fileno()] = stranger
        self._selector.register(channel, selectors.EVENT_READ)
        try:
            channel.send(messages.encode(messages.Challenge(nonce=stranger.nonce)))
        except OSError:
            self._turn_away(stranger)

    def _read_stranger(self, stranger: _Stranger) -> None:
        try:
            frames = stranger.channel.receive_available()
            if frames is None:
                self._turn_away(stranger)
            elif frames:
                self._welcome(stranger, messages.decode_server_message(frames[0]))
        except (ProtocolError, OSError) as error:
            logger.warning("a connection was turned away: %s", error)
            self._turn_away(stranger)

    def _welcome(self, stranger: _Stranger, message: ServerMessage) -> None:
        if not isinstance(message, messages.Connect):
            raise ProtocolError(f"the first message must be connect, not {type(message).__name__.lower()}")
        messages.check_proof(self._secret, "server", stranger.nonce, message.proof)
        if message.version != messages.PROTOCOL_VERSION:
            raise ProtocolError(f"protocol version {message.version}; this agent speaks {messages.PROTOCOL_VERSION}")
        self.memory = SlotMemory.attach(message.shm_name, self._limits, message.num_slots)
        self.exchange = self._attach_exchange(message)
        self._strangers.pop(stranger.channel.fileno())
        self._server = stranger.channel
        self._server.set_timeout(None)
        for other in list(self._strangers.values()):
            self._turn_away(other)
        proof = messages.prove(self._secret, "agent", message.nonce)
        self.send(messages.Connected(proof=proof, pid=os.getpid(), rank=self._rank))
        self._connected.set()

    def _attach_exchange(self, message: messages.Connect) -> ExchangeMemory | None:
        if (self._exchange_layout is None) != (message.exchange_name == ""):
            raise ProtocolError(
                f"the server names the exchange {message.exchange_name!r}; "
                + ("an agent alone has none" if self._exchange_layout is None else "an agent of a group needs one")
            )
        if self._exchange_layout is None:
            return None
        return ExchangeMemory.attach(message.exchange_name, self._exchange_layout)

    def _turn_away(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.channel)
        self._strangers.pop(stranger.channel.fileno())
        stranger.channel.close()

    def _drop_late_strangers(self) -> None:
        now = time.monotonic()
        for stranger in [s for s in self._strangers.values() if s.deadline <= now]:
            logger.warning("a connection said nothing for %.0f s and was closed", HANDSHAKE_TIMEOUT_S)
            self._turn_away(stranger)

    def _read_server(self) -> None:
        assert self._server is not None
        frames = self._server.receive_available()
        if frames is None:
            os._exit(0)
        for payload in frames:
            self._dispatch(messages.decode_server_message(payload))

    def _dispatch(self, message: ServerMessage) -> None:
        if isinstance(message, messages.Status):
            self.send(self._status(message.seq))
        elif isinstance(message, messages.Abort):
            step = self._queue.remove_step(message.step)
            if step is not None:
                self.send(StepDone(seq=step.seq, slot=step.slot, aborted=True))
        elif isinstance(message, messages.Connect):
            raise ProtocolError("connect came twice")
        else:
            self._check_slot(message)
            if isinstance(message, messages.Reset) and not self._queue.in_order:  # others may have begun one of them
                self._queue.remove_all_steps()
            self._queue.put(message)

    def _check_slot(self, message: ServerMessage) -> None:
        assert self.memory is not None
        if isinstance(message, messages.Step) and message.slot >= self.memory.num_slots:
            raise ProtocolError(f"step {message.seq} names slot {message.slot}; there are {self.memory.num_slots}")

    def _status(self, seq: int) -> messages.StatusReply:
        resident = psutil.Process().memory_info().rss
        return messages.StatusReply(
            seq=seq, steps=self._queue.steps_taken, queued=self._queue.num_steps, rss_bytes=int(resident)
        )
