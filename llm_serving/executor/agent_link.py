"""The server's side of one agent: its process, its connection and its progress while it starts."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from llm_serving.config import Config
from llm_serving.errors import AgentLostError, AgentStartError, ProtocolError
from llm_serving.executor.agent_process import AgentProcess, AgentProgram, describe_exit
from llm_serving.ipc import messages
from llm_serving.ipc.channel import Channel
from llm_serving.ipc.exchange import ExchangeLayout, ExchangeMemory
from llm_serving.ipc.host_pool import HostPoolLayout, HostPoolMemory
from llm_serving.ipc.messages import NONCE_BYTES, AgentMessage
from llm_serving.ipc.segment import creation_failure
from llm_serving.ipc.shm import NUM_SLOTS, SlotLayout, SlotMemory
from llm_serving.telemetry.log_file import Rotation

ProgressReport = Callable[[int, str, int, int], None]
"""Reports the progress of an agent's start. Takes its rank, the stage, and completed and total units of work."""

EXIT_WAIT_S = 0.25
"""Maximum seconds to wait for an exit code. A process closes its sockets shortly before its exit code is known."""


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """The shared memory of one group of agents: the step slots, the exchange (if there are several agents), and the
    host blocks.

    The server creates and frees this memory. An agent of the group maps all of it, except the host blocks of other
    agents.
    """

    slot_memory: SlotMemory
    exchange: ExchangeMemory | None
    pools: tuple[HostPoolMemory, ...] = ()
    """The host blocks of each agent, in order of rank. Empty without KV tiers."""

    @classmethod
    def create(cls, config: Config, ranks: Sequence[int] = ()) -> GroupMemory:
        """Makes new segments for the agents ``ranks`` and reserves their pages.

        Raises AgentStartError if /dev/shm is too small.
        """
        limits, parallel = config.slot_limits(), config.parallel_config
        layout = None if parallel.group_size == 1 else ExchangeLayout.of(config.shape, limits, parallel)
        pools = [pool for rank in ranks if (pool := HostPoolLayout.of(config, rank)) is not None]
        try:
            with ExitStack() as made:
                slot_memory = SlotMemory.create(limits, NUM_SLOTS)
                made.callback(slot_memory.close)
                exchange = None if layout is None else ExchangeMemory.create(layout)
                made.callback(lambda: exchange.close() if exchange is not None else None)
                host_pools = [made.enter_context(closing(HostPoolMemory.create(pool))) for pool in pools]
                made.pop_all()
                return cls(slot_memory, exchange, tuple(host_pools))
        except OSError as error:
            needed = SlotLayout.of(limits).slot_bytes * NUM_SLOTS + (0 if layout is None else layout.num_bytes)
            tiers = sum(pool.num_bytes for pool in pools)
            content = f"{needed} bytes of step slots and exchange"
            content += f" and {tiers} bytes of KV tiers" if tiers else ""
            remedy = "give it more, or lower scheduler_config.max_num_batched_tokens"
            remedy += " or kv_tier_config.host_blocks" if tiers else ""
            raise AgentStartError(creation_failure(error, content, remedy)) from error

    def mark_down(self) -> None:
        """Marks the group as ended, so that agents that wait for each other stop."""
        if self.exchange is not None:
            self.exchange.mark_down()

    def unlink(self) -> None:
        """Removes the names of the segments. The mappings stay. May be called twice."""
        self.slot_memory.unlink()
        for pool in self.pools:
            pool.unlink()
        if self.exchange is not None:
            self.exchange.unlink()

    def close(self) -> None:
        """Removes the segments' names and the server's mappings of the segments."""
        self.slot_memory.close()
        for pool in self.pools:
            pool.close()
        if self.exchange is not None:
            self.exchange.close()


class AgentLink:
    """One agent, from its start to its end. This object owns the agent's process and socket. The group owns the shared
    memory.

    ``receive`` handles the messages about the agent's start, and returns the other messages for the engine. If the
    agent has ended, ``receive`` raises AgentStartError or AgentLostError. The owner must then close the link.
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        listener: socket.socket,
        log_path: Path,
        report: ProgressReport,
        memory: GroupMemory,
        program: AgentProgram | None = None,
        environment: Mapping[str, str] | None = None,
        pool_name: str = "",
        tiles_name: str = "",
        hand_over_name: str = "",
    ) -> None:
        """``pool_name``: name of the shared memory with the agent's host blocks, empty without KV tiers.

        ``tiles_name``: name of the shared memory with the tiles of images, empty if the model reads no images.
        ``hand_over_name``: name of the agent's hand-over pool, empty if it has none.
        """
        self.rank = rank
        self.address = "{}:{}".format(*listener.getsockname()[:2])
        self._pool_name = pool_name
        self._tiles_name = tiles_name
        self._hand_over_name = hand_over_name
        self.is_connected = False
        """True after the agent has proved the launch secret and mapped the shared memory."""
        self.is_ready = False
        self.summary: dict[str, str | int | float] = {}
        self.started_at = time.monotonic()
        self._report = report
        self._memory = memory
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        rotation = Rotation.of_mib(config.log_config.max_mib, config.log_config.keep_files)
        self.process = AgentProcess(listener, rank, config.to_json(), log_path, program, environment, rotation)
        self.channel = Channel(self.process.socket)

    @property
    def pid(self) -> int:
        return self.process.pid

    def receive(self) -> list[AgentMessage]:
        """Returns the messages for the engine since the last call. Call it when the channel is readable."""
        try:
            frames = self.channel.receive_available()
        except (OSError, ProtocolError) as error:
            raise self._lost(f"the connection broke: {error}") from error
        if frames is None:
            raise self._lost("it closed the connection")
        passed_on: list[AgentMessage] = []
        for payload in frames:
            try:
                message = messages.decode_agent_message(payload)
                if not self._handle_start(message):
                    passed_on.append(message)
            except ProtocolError as error:
                raise self._lost(str(error)) from error
        return passed_on

    def check_alive(self) -> None:
        """Raises AgentStartError or AgentLostError if the process has ended."""
        if self.process.exit_code() is not None:
            raise self._lost("its process ended")

    def close(self) -> None:
        """Ends the process, waits until it has ended, and frees the resources of this object."""
        self.channel.close()
        self.process.close()

    def _handle_start(self, message: AgentMessage) -> bool:
        """Handles a message about the agent's start. Returns False for any other message, which is for the engine."""
        if isinstance(message, messages.Challenge):
            self._answer_challenge(message)
        elif isinstance(message, messages.Connected):
            messages.check_proof(self.process.secret, "agent", self._nonce, message.proof)
            self.is_connected = True
        elif not self.is_connected:
            raise ProtocolError(
                f"agent {self.rank} sent {type(message).__name__} before it had proved that it knows the launch secret"
            )
        elif isinstance(message, messages.Progress) and not self.is_ready:
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
            num_slots=NUM_SLOTS,
            exchange_name="" if self._memory.exchange is None else self._memory.exchange.name,
            pool_name=self._pool_name,
            tiles_name=self._tiles_name,
            hand_over_name=self._hand_over_name,
        )
        try:
            self.channel.send(messages.encode(connect))
        except OSError as error:
            raise self._lost(f"the connection broke: {error}") from error

    def _lost(self, reason: str) -> AgentStartError | AgentLostError:
        """Returns the error for an agent that has ended: exit code, path of its log and, during the start, the log's
        end."""
        exit_text = describe_exit(self.process.exit_code(wait_s=EXIT_WAIT_S))
        ended = f" ({exit_text})" if exit_text else ""
        text = f"agent {self.rank}, process {self.process.pid}: {reason}{ended}; its log is {self.process.log.path}"
        if self.is_ready:
            return AgentLostError(text)
        tail = self.process.log.tail()
        return AgentStartError(f"{text}, and ends with:\n{tail}" if tail else text)
