"""The agents of a replica on this machine: the links to them, and the shared memory that they map."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from llm_serving.config import Config
from llm_serving.errors import AgentError, AgentLostError, AgentStartError
from llm_serving.executor.agent_link import AgentLink, GroupMemory, ProgressReport
from llm_serving.executor.agent_process import STOP_GRACE_S, AgentProgram
from llm_serving.executor.group import Received, Source
from llm_serving.executor.hccl_cluster import ClusterPlace, GroupPart, HcclCluster
from llm_serving.executor.step_forecast import OtherWork, StepForecast
from llm_serving.executor.vitals import Vitals
from llm_serving.ipc import messages
from llm_serving.ipc.adapters import AdapterMemory
from llm_serving.ipc.host_pool import HostPoolMemory
from llm_serving.ipc.messages import AgentMessage, ServerMessage, StepDone
from llm_serving.ipc.shm import StepSlot
from llm_serving.model.parallel import answering_rank, group_ranks


class AgentGroup:
    """A ``Group`` of agents on this machine.

    It owns the links and the shared memory. ``listeners`` and ``links`` are in order of rank.
    """

    is_leaving = False

    def __init__(
        self,
        config: Config,
        replica: int,
        listeners: Sequence[socket.socket],
        log_folder: Path,
        report: ProgressReport,
        program: AgentProgram,
        tiles_name: str = "",
        hand_over_names: Sequence[str] = (),
        min_sleep_s: float = 0.0,
        memory: GroupMemory | None = None,
        part: GroupPart | None = None,
    ) -> None:
        """``hand_over_names`` are the names of the agents' hand-over pools. They are empty without hand-over pools.

        Agents that sleep during a step are not counted as lost before ``min_sleep_s`` seconds have passed.
        ``memory`` is the group's shared memory. If it is None, it is created here, which takes seconds for each GiB of
        host blocks. ``part`` is this machine's part of the group, or None if all agents are on this machine.
        ``listeners`` and ``hand_over_names`` have one element for each agent of this machine, in order of rank.
        """
        group = group_ranks(replica, config.parallel_config)
        ranks = group if part is None else group[part.members.start : part.members.stop]
        self.links: list[AgentLink] = []
        self.is_ready = False
        """True if every agent of the group is ready."""
        self._vitals: Vitals | None = None
        self._forecast = StepForecast()
        self._other_work = OtherWork(len(ranks))
        self._runs_operator_code = bool(config.model_config.logits_processors)
        """True if steps call logits processors: Python code of the operator, which may run for any time."""
        self._min_sleep_s = min_sleep_s
        self._first_rank = ranks.start
        self._may_sleep = config.device != "CPU"
        """True if all agents of this machine may sleep during a step, until a device has completed its work."""
        self._waits_for_others = part is not None
        answering = answering_rank(replica, config.parallel_config)
        self.answers = answering in ranks
        """True if the agent that writes the results of steps is on this machine."""
        self._answering = answering - ranks.start if self.answers else 0
        self.memory = memory or GroupMemory.create(config, ranks)
        self._cluster: HcclCluster | None = None
        try:
            place = ClusterPlace.of(config, part)
            if place is not None:
                self._cluster = _started_cluster(place, part, log_folder / f"cluster_{replica}.log")
            for rank, listener in zip(ranks, listeners, strict=True):
                log_path = log_folder / f"agent_{rank}.log"
                environment = {} if place is None else place.environment(rank - group.start)
                pool_name = self.memory.pools[rank - ranks.start].name if self.memory.pools else ""
                self.links.append(
                    AgentLink(
                        *(config, rank, listener, log_path, report, self.memory, program, environment, pool_name),
                        tiles_name=tiles_name,
                        hand_over_name=hand_over_names[rank - ranks.start] if hand_over_names else "",
                    )
                )
        except BaseException:
            self.close()
            raise

    @property
    def members(self) -> Sequence[AgentLink]:
        return self.links

    @property
    def started_at(self) -> float:
        return self.links[0].started_at

    @property
    def slots(self) -> Sequence[StepSlot]:
        return self.memory.slot_memory.slots

    @property
    def pools(self) -> Sequence[HostPoolMemory]:
        return self.memory.pools

    def sources(self) -> list[Source]:
        """Returns two sources for each agent: its connection, and a descriptor that becomes readable at its exit.

        If this machine runs the scheduler process of the MindSpore cluster, the exit descriptor of this process is the
        last source.
        """
        sources: list[Source] = []
        for member, link in enumerate(self.links):
            sources.append((link.channel, partial(self._receive, member, link)))
            sources.append((link.process.exit_descriptor, partial(self._take_exit, member, link)))
        if self._cluster is not None:
            sources.append((self._cluster.exit_descriptor, self._take_cluster_exit))
        return sources

    @property
    def summary(self) -> dict[str, object]:
        """Values for the log, which the agent that samples has reported. With several agents, also the number of
        agents.
        """
        size = {"agents": len(self.links)} if len(self.links) > 1 else {}
        return {**self.links[self._answering].summary, **size}

    def note_progress(self) -> None:
        """Updates ``is_ready`` while agents start. When all agents have mapped the shared memory, removes its names."""
        if all(link.is_connected for link in self.links):
            self.memory.unlink()
            self.is_ready = all(link.is_ready for link in self.links)
        if self.is_ready:
            pids = [link.process.pid for link in self.links]
            self._vitals = Vitals(
                *(pids, self._first_rank),
                may_sleep=self._may_sleep,
                min_sleep_s=self._min_sleep_s,
                waits_for_others=self._waits_for_others,
            )

    def is_quiet(self, last_sign: float) -> bool:
        """Returns True if all agents of this machine sleep, perhaps only to wait for agents on other machines. See
        ``Vitals``.
        """
        return self._vitals is not None and self._vitals.is_quiet(last_sign)

    def next_look(self, last_result: float | None) -> float | None:
        return None if last_result is None or self._vitals is None else self._vitals.next_look(last_result)

    def look(self, now: float, last_result: float, slots: Iterable[int], last_data: float = 0.0) -> None:
        """Raises AgentLostError if the agents will never complete their step, because they are stopped or hang.

        For ``last_data`` see ``Vitals.look``.
        """
        if self._vitals is None:
            return
        own, forecast_s = self.slots, None
        if not self._other_work.is_possible and not self._runs_operator_code:
            forecast_s = self._forecast.seconds(own[slot] for slot in slots)
        reason = self._vitals.look(now, last_result, forecast_s, self._forecast.longest_s, last_data)
        if reason is not None:
            raise AgentLostError(reason)

    def send(self, message: ServerMessage, encoded: bytes = b"") -> None:
        """Sends a message to every agent. A broken connection is ignored, because ``receive`` reports it.

        ``encoded`` is the encoded message, if the caller already has it.
        """
        payload = encoded or messages.encode(message)
        if not isinstance(message, messages.Step):
            self._other_work.sent(message)
        for link in self.links:
            with contextlib.suppress(OSError):
                link.channel.send(payload)

    def load_adapter(self, message: messages.AdapterLoad, memory: AdapterMemory) -> None:
        """Lets every agent map and load the adapter."""
        self.send(message)

    def describe_loss(self, noticed: AgentError) -> AgentError:
        """Returns the error ``noticed``, extended by the names of the other agents of the group that have also ended.

        The server may notice the end of another agent before the end of the agent that failed first.
        """
        others = [
            f"agent {link.rank} ended too ({code})"
            for link in self.links
            if not str(noticed).startswith((f"agent {link.rank},", f"agent {link.rank} "))
            and (code := link.process.exit_text())
        ]
        if not others:
            return noticed
        kind = AgentStartError if isinstance(noticed, AgentStartError) else AgentLostError
        return kind(f"{noticed}; {', '.join(others)}")

    def kill(self) -> None:
        """Kills all agents without waiting. The caller must call ``close`` later."""
        self.memory.mark_down()
        for link in self.links:
            link.process.kill()
        if self._cluster is not None:
            self._cluster.kill()

    def close(self) -> None:
        """Ends all agents, waits until they have ended, and frees their resources."""
        self.kill()
        for link in self.links:
            link.close()
        if self._cluster is not None:
            self._cluster.close()
        self.memory.close()

    def shutdown(self, seq: int) -> None:
        """Asks all agents to end and waits for a short time, then closes."""
        self.send(messages.Shutdown(seq=seq))
        for link in self.links:
            link.channel.close()  # the agent ends when it notices that the connection is closed
        until = time.monotonic() + STOP_GRACE_S
        for link in self.links:
            link.process.stop(max(0.0, until - time.monotonic()))
        self.close()

    def _receive(self, member: int, link: AgentLink) -> Received:
        received: list[tuple[int, AgentMessage]] = []
        for message in link.receive():
            self._other_work.received(message)
            if isinstance(message, StepDone) and member == self._answering and message.slot < len(self.slots):
                self._forecast.learn(self.slots[message.slot], message)
            if not isinstance(message, messages.Progress):
                received.append((member, message))
        return received

    def _take_exit(self, member: int, link: AgentLink) -> Received:
        # Read the last messages first, because they usually contain the reason for the exit.
        received = self._receive(member, link)
        link.check_alive()
        return received

    def _take_cluster_exit(self) -> Received:
        assert self._cluster is not None
        raise self._cluster.loss(is_ready=self.is_ready)


def _started_cluster(place: ClusterPlace, part: GroupPart | None, log_path: Path) -> HcclCluster | None:
    """Starts the scheduler process of the group's MindSpore cluster. Returns None if another machine starts it."""
    if part is not None:
        if part.reserved is None:
            return None
        part.reserved.close()  # the cluster's scheduler process binds this port
    return HcclCluster(place, log_path)
