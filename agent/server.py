"""The agent's socket thread: accepts the server, checks the launch secret, reads messages and fills the task queue.

One thread runs ``AgentServer.serve`` and never uses the device. Therefore the agent replies to ``Status`` and notices
the end of the server while a step runs. A connection without the secret is rejected and has no effect.
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
class _PendingConnection:
    """A connection that has not proved yet that it knows the secret."""

    channel: Channel
    nonce: bytes
    deadline: float


class AgentServer:
    """Owns the listening socket, the connection to the server, and the mappings of step slots and exchange."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: bytes,
        limits: SlotLimits,
        queue: TaskQueue,
        exchange: ExchangeLayout | None = None,
    ) -> None:
        """``exchange`` is the layout of the group's exchange, or None if the group has one agent."""
        self._listener = listener
        self._secret = secret
        self._limits = limits
        self._queue = queue
        self._selector = selectors.DefaultSelector()
        self._pending: dict[int, _PendingConnection] = {}
        self._server: Channel | None = None
        self._send_lock = threading.Lock()
        self._connected = threading.Event()
        self._exchange_layout = exchange
        self.memory: SlotMemory | None = None
        self.exchange: ExchangeMemory | None = None

    def serve(self) -> None:
        """Reads messages until the server has ended, then ends the process."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in self._selector.select(timeout=self._next_timeout()):
                    self._handle(key.fileobj)
                self._drop_late()
        except (ProtocolError, OSError) as error:
            logger.error("the connection to the server is lost: %s", error)
            os._exit(1)

    def wait_until_connected(self) -> SlotMemory:
        """Waits until the server has proved the secret and the step slots are mapped."""
        self._connected.wait()
        assert self.memory is not None
        return self.memory

    def send(self, message: AgentMessage) -> None:
        """Sends a message to the server. Thread-safe. Ignores a lost connection, because ``serve`` handles it."""
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
            self._read_pending(self._pending[source.fileno()])

    def _next_timeout(self) -> float | None:
        if not self._pending:
            return None
        return max(0.0, min(pending.deadline for pending in self._pending.values()) - time.monotonic())

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        if self._server is not None or len(self._pending) >= MAX_PENDING_CONNECTIONS:
            connection.close()
            return
        connection.setblocking(True)
        channel = Channel(connection)
        channel.set_timeout(HANDSHAKE_TIMEOUT_S)
        pending = _PendingConnection(channel, secrets.token_bytes(NONCE_BYTES), time.monotonic() + HANDSHAKE_TIMEOUT_S)
        self._pending[channel.fileno()] = pending
        self._selector.register(channel, selectors.EVENT_READ)
        try:
            channel.send(messages.encode(messages.Challenge(nonce=pending.nonce)))
        except OSError:
            self._reject(pending)

    def _read_pending(self, pending: _PendingConnection) -> None:
        try:
            frames = pending.channel.receive_available()
            if frames is None:
                self._reject(pending)
            elif frames:
                self._accept_server(pending, messages.decode_server_message(frames[0]))
        except (ProtocolError, OSError) as error:
            logger.warning("a connection was rejected: %s", error)
            self._reject(pending)

    def _accept_server(self, pending: _PendingConnection, message: ServerMessage) -> None:
        if not isinstance(message, messages.Connect):
            raise ProtocolError(f"the first message must be connect, not {type(message).__name__.lower()}")
        messages.check_proof(self._secret, "server", pending.nonce, message.proof)
        if message.version != messages.PROTOCOL_VERSION:
            raise ProtocolError(f"protocol version {message.version}; this agent speaks {messages.PROTOCOL_VERSION}")
        self.memory = SlotMemory.attach(message.shm_name, self._limits, message.num_slots)
        self.exchange = self._attach_exchange(message)
        self._pending.pop(pending.channel.fileno())
        self._server = pending.channel
        self._server.set_timeout(None)
        for other in list(self._pending.values()):
            self._reject(other)
        proof = messages.prove(self._secret, "agent", message.nonce)
        self.send(messages.Connected(proof=proof))
        self._connected.set()

    def _attach_exchange(self, message: messages.Connect) -> ExchangeMemory | None:
        if (self._exchange_layout is None) != (message.exchange_name == ""):
            raise ProtocolError(
                f"the server names the exchange {message.exchange_name!r}; an agent "
                + ("without a group has none" if self._exchange_layout is None else "of a group needs one")
            )
        if self._exchange_layout is None:
            return None
        return ExchangeMemory.attach(message.exchange_name, self._exchange_layout)

    def _reject(self, pending: _PendingConnection) -> None:
        self._selector.unregister(pending.channel)
        self._pending.pop(pending.channel.fileno())
        pending.channel.close()

    def _drop_late(self) -> None:
        now = time.monotonic()
        for pending in [each for each in self._pending.values() if each.deadline <= now]:
            logger.warning("a connection sent no valid message for %.0f s and was closed", HANDSHAKE_TIMEOUT_S)
            self._reject(pending)

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
            raise ProtocolError("the server sent connect twice")
        else:
            self._check_slot(message)
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
