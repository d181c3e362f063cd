"""The agent's socket thread: checks the launch secret, reads the server's messages and fills the task queue.

One thread runs ``AgentServer.serve`` and never uses the device. Therefore the agent replies to ``Status`` and notices
the end of the server even while a step runs. The agent inherits the connected socket, so it never accepts a connection.
Any error in this thread ends the process: without the thread, the agent could neither serve nor end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading

import psutil

from agent.mask_gate import MaskGate
from agent.task_queue import TaskQueue
from llm_serving.errors import ProtocolError
from llm_serving.ipc import messages
from llm_serving.ipc.channel import Channel
from llm_serving.ipc.exchange import ExchangeLayout, ExchangeMemory
from llm_serving.ipc.hand_over_memory import HandOverLayout, HandOverMemory
from llm_serving.ipc.host_pool import HostPoolLayout, HostPoolMemory
from llm_serving.ipc.messages import NONCE_BYTES, AgentMessage, ServerMessage, StepDone
from llm_serving.ipc.shm import SlotLimits, SlotMemory
from llm_serving.ipc.tile_memory import TileLayout, TileMemory

logger = logging.getLogger("agent.server")

HANDSHAKE_TIMEOUT_S = 60.0
"""Maximum seconds that an agent waits for the server's messages of the handshake."""


class AgentServer:
    """Owns the connection to the server, and the shared memory of step slots, exchange, host blocks and tiles."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        secret: bytes,
        limits: SlotLimits,
        queue: TaskQueue,
        exchange: ExchangeLayout | None = None,
        pool: HostPoolLayout | None = None,
        tiles: TileLayout | None = None,
        hand_over: HandOverLayout | None = None,
    ) -> None:
        """``exchange`` is the layout of the group's exchange, or None if the group has one agent.

        ``pool`` is the layout of the agent's host blocks, or None without KV tiers. ``tiles`` is the layout of the
        memory with tiles, or None if the model reads no images. ``hand_over`` is the layout of the hand-over pool, or
        None if the replicas have no roles.
        """
        self._server = Channel(connection)
        self._secret = secret
        self._limits = limits
        self._queue = queue
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._send_lock = threading.Lock()
        self._connected = threading.Event()
        self._exchange_layout = exchange
        self.masks = MaskGate()
        self.memory: SlotMemory | None = None
        self.exchange: ExchangeMemory | None = None
        self._pool_layout = pool
        self.pool: HostPoolMemory | None = None
        """The host blocks in shared memory. None without KV tiers."""
        self._tile_layout = tiles
        self.tiles: TileMemory | None = None
        """The tiles of images in shared memory. None if the model reads no images."""
        self._hand_over_layout = hand_over
        self.hand_over: HandOverMemory | None = None
        """The hand-over pool in shared memory. None if the replicas have no roles."""

    def serve(self) -> None:
        """Reads messages until the server has ended, then ends the process."""
        try:
            self._server.set_timeout(HANDSHAKE_TIMEOUT_S)
            self._server.send(messages.encode(messages.Challenge(nonce=self._nonce)))
            while (frames := self._server.receive_available()) is not None:
                for payload in frames:
                    self._dispatch(messages.decode_server_message(payload))
            os._exit(0)
        except (ProtocolError, OSError) as error:
            logger.error("the connection to the server is lost: %s", error)
        except BaseException:
            logger.exception("the socket thread failed")
        os._exit(1)

    def wait_until_connected(self) -> SlotMemory:
        """Waits until the server has proved that it knows the launch secret. Returns the mapped step slots."""
        self._connected.wait()
        assert self.memory is not None
        return self.memory

    def send(self, message: AgentMessage) -> None:
        """Sends a message to the server. Thread-safe. Ignores a lost connection, because ``serve`` handles it."""
        with self._send_lock, contextlib.suppress(OSError):
            self._server.send(messages.encode(message))

    def _accept_server(self, message: messages.Connect) -> None:
        """Checks the server's proof that it knows the launch secret, then maps the shared memory."""
        if self.memory is not None:
            raise ProtocolError("the server sent connect twice")
        messages.check_proof(self._secret, "server", self._nonce, message.proof)
        if message.version != messages.PROTOCOL_VERSION:
            raise ProtocolError(
                f"the server has protocol version {message.version}, this agent {messages.PROTOCOL_VERSION}; install "
                "the same release for both"
            )
        self.memory = SlotMemory.attach(message.shm_name, self._limits, message.num_slots)
        self.exchange = self._attach_exchange(message)
        if self._pool_layout is not None:
            self.pool = HostPoolMemory.attach(message.pool_name, self._pool_layout)
        if self._tile_layout is not None:
            self.tiles = TileMemory.attach(message.tiles_name, self._tile_layout)
        if self._hand_over_layout is not None:
            self.hand_over = HandOverMemory.attach(message.hand_over_name, self._hand_over_layout)
        self._server.set_timeout(None)
        self.send(messages.Connected(proof=messages.prove(self._secret, "agent", message.nonce)))
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

    def _dispatch(self, message: ServerMessage) -> None:
        if isinstance(message, messages.Connect):
            self._accept_server(message)
        elif self.memory is None:
            raise ProtocolError(f"the first message must be connect, not {type(message).__name__.lower()}")
        elif isinstance(message, messages.Status):
            self.send(self._status(message.seq))
        elif isinstance(message, messages.Abort):
            step = self._queue.remove_step(message.step)
            if step is not None:
                self.send(StepDone(seq=step.seq, slot=step.slot, aborted=True))
        elif isinstance(message, messages.Masks):
            self._check_slot(message)
            self.masks.note(message)
        elif isinstance(message, messages.Bias):
            self.masks.note_bias(message)
        else:
            self._check_slot(message)
            self._queue.put(message)

    def _check_slot(self, message: ServerMessage) -> None:
        assert self.memory is not None
        if isinstance(message, messages.Step | messages.Masks) and message.slot >= self.memory.num_slots:
            raise ProtocolError(f"step {message.seq} names slot {message.slot}; there are {self.memory.num_slots}")

    def _status(self, seq: int) -> messages.StatusReply:
        resident = psutil.Process().memory_info().rss
        return messages.StatusReply(
            seq=seq, steps=self._queue.steps_taken, queued=self._queue.num_steps, rss_bytes=int(resident)
        )
