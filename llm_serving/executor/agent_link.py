"""The server's end of one agent: its process, its connection, and how far its start has come."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from llm_serving.config import Config
from llm_serving.errors import AgentLostError, AgentStartError, ProtocolError
from llm_serving.executor.agent_process import AgentProcess, describe_exit
from llm_serving.executor.group_memory import GroupMemory
from llm_serving.ipc import messages
from llm_serving.ipc.channel import Channel
from llm_serving.ipc.messages import NONCE_BYTES, AgentMessage
from llm_serving.ipc.shm import NUM_SLOTS

ProgressReport = Callable[[int, str, int, int], None]
"""Called with rank, stage, units done, units in all."""

CONNECT_TIMEOUT_S = 5.0
DYING_S = 0.25
"""A process's sockets close a moment before its exit code is there to be told."""


class AgentLink:
    """One run of one agent, from its start to its end. Owns its process and socket; the memory is its group's.

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
        memory: GroupMemory,
        agent_module: str = "agent",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.rank = rank
        self.is_connected = False
        """It has proved itself, and mapped the shared memory."""
        self.is_ready = False
        self.summary: dict[str, str | int | float] = {}
        self.started_at = time.monotonic()
        self._report = report
        self._memory = memory
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.process = AgentProcess(listener, rank, config.to_json(), log_path, agent_module, environment)
        self._channel = self._connect(listener)

    def _connect(self, listener: socket.socket) -> Channel:
        try:
            connection = socket.create_connection(listener.getsockname()[:2], timeout=CONNECT_TIMEOUT_S)
        except OSError as error:
            self.process.close()
            raise AgentStartError(f"agent {self.rank}: cannot connect to its port: {error}") from error
        connection.settimeout(CONNECT_TIMEOUT_S)
        return Channel(connection)

    @property
    def channel_descriptor(self) -> int:
        return self._channel.fileno()

    def send(self, payload: bytes) -> None:
        """Send an encoded message. Raises AgentLostError when the agent is gone."""
        try:
            self._channel.send(payload)
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

    def hang_up(self) -> None:
        """Close the connection: the agent ends when it notices."""
        self._channel.close()

    def close(self) -> None:
        """End the process, wait until it has ended, and free everything that belongs to this run."""
        self._channel.close()
        self.process.close()

    def _handle_start(self, message: AgentMessage) -> bool:
        """Take the messages of the start; False for those that are the engine's."""
        if isinstance(message, messages.Challenge):
            self._answer_challenge(message)
        elif isinstance(message, messages.Connected):
            messages.check_proof(self.process.secret, "agent", self._nonce, message.proof)
            self.is_connected = True
        elif not self.is_connected:
            raise ProtocolError(f"agent {self.rank} sent {type(message).__name__} before it had proved itself")
        elif isinstance(message, messages.Progress):
            self._report(self.rank, message.stage, message.done, message.total)
        elif isinstance(message, messages.Ready):
            self.is_ready = True
            self.summary = message.summary
        elif isinstance(message, messages.Failed):
            raise AgentStartError(f"agent {self.rank} could not start: {message.error}\n{message.traceback}")
        else:
            return False
        return True

    def _answer_challenge(self, challenge: messages.Challenge) -> None:
        if self.is_connected:
            raise ProtocolError(f"agent {self.rank} sent a second challenge")
        connect = messages.Connect(
            version=messages.PROTOCOL_VERSION,
            nonce=self._nonce,
            proof=messages.prove(self.process.secret, "server", challenge.nonce),
            shm_name=self._memory.slot_memory.name,
            shm_bytes=self._memory.slot_memory.num_bytes,
            num_slots=NUM_SLOTS,
            exchange_name=self._memory.exchange_name,
            exchange_bytes=self._memory.exchange_bytes,
        )
        self.send(messages.encode(connect))

    def _over(self, reason: str) -> AgentStartError | AgentLostError:
        return AgentLostError(self._epitaph(reason)) if self.is_ready else AgentStartError(self._epitaph(reason))

    def _epitaph(self, reason: str) -> str:
        exit_text = describe_exit(self.process.exit_code(wait_s=DYING_S))
        ended = f" ({exit_text})" if exit_text else ""
        text = f"agent {self.rank}, process {self.process.pid}: {reason}{ended}; its log is {self.process.log_path}"
        tail = self.process.log_tail() if not self.is_ready else ""
        return f"{text}, and ends with:\n{tail}" if tail else text
