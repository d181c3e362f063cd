"""The server's end of one agent: its process, its connection, and how far its start has come."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from llm_serving.config import Config
from llm_serving.errors import AgentLostError, AgentStartError, ProtocolError
from llm_serving.executor.agent_process import AgentProcess
from llm_serving.ipc import messages
from llm_serving.ipc.channel import Channel
from llm_serving.ipc.messages import NONCE_BYTES, AgentMessage, ServerMessage
from llm_serving.ipc.shm import NUM_SLOTS, SlotMemory

ProgressReport = Callable[[int, str, int, int], None]
"""Called with rank, stage, units done, units in all."""

CONNECT_TIMEOUT_S = 5.0
DYING_S = 0.25
"""A process's sockets close a moment before its exit code is there to be told."""


class AgentLink:
    """One run of one agent, from its start to its end. Owns its process, socket and step slots.

    ``receive`` turns what arrived into messages for the engine and handles the start's own messages itself.
    Raises AgentStartError or AgentLostError when the run is over; the link is then closed by its owner.
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        listener: socket.socket,
        log_path: Path,
        report: ProgressReport,
        agent_module: str = "agent",
    ) -> None:
        self.rank = rank
        self.ready = False
        self.summary: dict[str, str | int | float] = {}
        self.started_at = time.monotonic()
        self._config = config
        self._report = report
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._connected = False
        self.memory = SlotMemory.create(config.slot_limits(), NUM_SLOTS)
        try:
            self.process = AgentProcess(listener, rank, config.to_json(), log_path, agent_module)
            self._channel = self._connect(listener)
        except BaseException:
            self.memory.close()
            raise

    def _connect(self, listener: socket.socket) -> Channel:
        try:
            connection = socket.create_connection(listener.getsockname()[:2], timeout=CONNECT_TIMEOUT_S)
        except OSError as error:
            self.process.kill()
            raise AgentStartError(f"agent {self.rank}: cannot connect to its port: {error}") from error
        connection.settimeout(CONNECT_TIMEOUT_S)
        return Channel(connection)

    @property
    def channel_descriptor(self) -> int:
        return self._channel.fileno()

    def send(self, message: ServerMessage) -> None:
        """Send a message. Raises AgentLostError when the agent is gone."""
        try:
            self._channel.send(messages.encode(message))
        except OSError as error:
            raise AgentLostError(self._epitaph(f"the connection broke: {error}")) from error

    def receive(self) -> list[AgentMessage]:
        """What arrived for the engine since the last call; call when the channel is readable."""
        try:
            frames = self._channel.receive_available()
        except (OSError, ProtocolError) as error:
            raise self._over(f"the connection broke: {error}") from error
        if frames is None:
            raise self._over("it closed the connection")
        passed_on: list[AgentMessage] = []
        for payload in frames:
            try:
                message = messages.decode_agent_message(payload)
                if not self._handle_start(message):
                    passed_on.append(message)
            except ProtocolError as error:
                raise self._over(str(error)) from error
        return passed_on

    def check_alive(self) -> None:
        """Raises AgentStartError or AgentLostError when the process has ended."""
        if self.process.exit_code() is not None:
            raise self._over("its process ended")

    def close(self) -> None:
        """End the process at once and free everything that belongs to this run."""
        self._channel.close()
        self.process.kill()
        self.memory.close()

    def shutdown(self, seq: int) -> None:
        """Ask it to end, wait a little, then as ``close``."""
        with contextlib.suppress(AgentLostError):
            self.send(messages.Shutdown(seq=seq))
        self._channel.close()
        self.process.stop()
        self.memory.close()

    def _handle_start(self, message: AgentMessage) -> bool:
        """Take the messages of the start; False for those that are the engine's."""
        if isinstance(message, messages.Challenge):
            self._answer_challenge(message)
        elif isinstance(message, messages.Connected):
            messages.check_proof(self.process.secret, "agent", self._nonce, message.proof)
            self._connected = True
            self.memory.unlink()
        elif not self._connected:
            raise ProtocolError(f"agent {self.rank} sent {type(message).__name__} before it had proved itself")
        elif isinstance(message, messages.Progress):
            self._report(self.rank, message.stage, message.done, message.total)
        elif isinstance(message, messages.Ready):
            self.ready = True
            self.summary = message.summary
        elif isinstance(message, messages.Failed):
            raise AgentStartError(f"agent {self.rank} could not start: {message.error}\n{message.traceback}")
        else:
            return False
        return True

    def _answer_challenge(self, challenge: messages.Challenge) -> None:
        if self._connected:
            raise ProtocolError(f"agent {self.rank} sent a second challenge")
        self.send(
            messages.Connect(
                version=messages.PROTOCOL_VERSION,
                nonce=self._nonce,
                proof=messages.prove(self.process.secret, "server", challenge.nonce),
                shm_name=self.memory.name,
                shm_bytes=self.memory.num_bytes,
                num_slots=NUM_SLOTS,
            )
        )

    def _over(self, reason: str) -> AgentStartError | AgentLostError:
        return AgentLostError(self._epitaph(reason)) if self.ready else AgentStartError(self._epitaph(reason))

    def _epitaph(self, reason: str) -> str:
        code = self.process.exit_code(wait_s=DYING_S)
        ended = "" if code is None else f" (signal {-code})" if code < 0 else f" (exit code {code})"
        text = f"agent {self.rank}, process {self.process.pid}: {reason}{ended}; its log is {self.process.log_path}"
        tail = self.process.log_tail() if not self.ready else ""
        return f"{text}, and ends with:\n{tail}" if tail else text
