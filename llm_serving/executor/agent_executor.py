"""The executor with real agents: steps go through step slots to a group of agents.

If an agent dies, the whole group is restarted. All work happens inside ``poll``, in the engine thread. One selector
waits for messages of the agents, for their exits, and for ``wake``. So an idle server sleeps.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from llm_serving.config import Config
from llm_serving.errors import AgentError, AgentLostError, AgentStartError, NodeDrainedError, SelfCheckError
from llm_serving.executor.adapter_slots import AdapterSlots
from llm_serving.executor.agent_group import AgentGroup
from llm_serving.executor.agent_link import ProgressReport
from llm_serving.executor.agent_process import AgentProgram
from llm_serving.executor.agent_states import AgentStates, Restarts
from llm_serving.executor.base import AgentLeaving, AgentLost, AgentProfiled, AgentReady, ExecutorEvent
from llm_serving.executor.group import Group, Received, StartGroup
from llm_serving.executor.pauses import PauseWatch
from llm_serving.executor.step_slots import StepSlots
from llm_serving.ipc import messages
from llm_serving.ipc.adapters import AdapterMemory
from llm_serving.ipc.host_pool import HostPool
from llm_serving.ipc.messages import AgentMessage
from llm_serving.ipc.shm import StepSlot
from llm_serving.ipc.tile_memory import TileMemory
from llm_serving.model.parallel import group_ranks
from llm_serving.scheduler.output import ScheduledStep, StepResult


class AgentExecutor:
    """Owns a replica's group of agents and the steps in flight. See ``base.Executor`` for the rules about threads.

    ``listeners`` has the listening socket of each of the replica's agents, in order of rank. Each agent writes its log
    to ``agent_RANK.log`` in ``log_folder``. If ``start_group`` is given, it starts agents on other machines, and
    ``listeners`` are not used. ``hand_over_names`` are the names of the agents' hand-over pools, in order of rank. They
    are empty without hand-over pools. ``tiles`` is the memory with the tiles of images, or None if the model reads no
    images. All replicas share this memory, and the caller closes it.
    """

    def __init__(
        self,
        config: Config,
        listeners: Sequence[socket.socket],
        log_folder: Path,
        report: ProgressReport | None = None,
        program: AgentProgram | None = None,
        replica: int = 0,
        start_group: StartGroup | None = None,
        hand_over_names: Sequence[str] = (),
        tiles: TileMemory | None = None,
    ) -> None:
        self._config = config
        self._ranks = group_ranks(replica, config.parallel_config)
        self._log_folder = log_folder
        local = (config, replica, listeners, log_folder, report or (lambda *progress: None), program or AgentProgram())
        self.tiles = tiles
        """The tiles of images, which restarted agents map again. None if the model reads no images."""
        tiles_name = "" if tiles is None else tiles.name
        self.start_group: StartGroup = start_group or partial(
            AgentGroup, *local, tiles_name=tiles_name, hand_over_names=hand_over_names
        )
        self._group: Group | None = None
        self._ending: Group | None = None
        self._is_waiting = False
        """True while the agents cannot start because no machine is free."""
        self._has_said_leaving = False
        self._has_said_ready = False
        """True after ``poll`` has reported ``AgentReady`` for the present group, whose agents then have all adapters.
        """
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, self._on_wake)
        self._steps = self._new_slots(())
        self._pauses = PauseWatch()
        self._start_pause_s = 0.0
        """Total seconds of the pauses of this process since the start of the agents."""
        self._control_seq = 0
        self._distrusted: SelfCheckError | None = None
        self._profile_seq = 0
        """Number of the newest message to the agents about a profile. Replies to earlier messages about profiles are
        ignored.
        """
        self._profiled: dict[int, dict[str, object]] = {}
        self._restarts = Restarts(config.serving_config.agent_restart_limit, from_the_start=start_group is not None)
        addresses = ["{}:{}".format(*listener.getsockname()[:2]) for listener in listeners]
        self._agent_states = AgentStates(config, replica, addresses, self._restarts)
        self._adapters = AdapterSlots(len(self._ranks))

    def start(self) -> None:
        """Starts the agents. ``poll`` then reports ``AgentReady`` or a final ``AgentLost``."""
        self._start_group()

    @property
    def group(self) -> Group | None:
        """The present run of the agents. None while there is none."""
        return self._group

    @property
    def num_free_slots(self) -> int:
        return len(self._steps.free_slots)

    def submit(self, step: ScheduledStep) -> None:
        """Writes the step into a free slot and announces it to the agents."""
        assert self._group is not None, "a step was submitted while no agent is ready"
        self._group.send(self._steps.write(step))
        self._pauses.begin(time.monotonic())

    def abort(self, seq: int) -> None:
        """Asks the agent to drop a step. With several agents, does nothing, because some of them may have begun the
        step.
        """
        if self._group is not None and self._steps.join is None and seq in self._steps.slot_of:
            self._group.send(messages.Abort(seq=self._control_number(), step=seq))

    def distrust(self, check: str, reason: str, step: int | None = None) -> None:
        if self._group is not None and self._group.is_ready:
            self._distrusted = SelfCheckError(f"{_agents(self._ranks)}: {reason}", check, step)
            self.wake()

    def publish_masks(self, seq: int, masks: Sequence[npt.NDArray[np.uint32]]) -> None:
        for message in self._steps.write_masks(seq, masks):
            if self._group is not None:
                self._group.send(message)

    def request_status(self) -> None:
        self._agent_states.ask()
        if self._group is not None and self._group.is_ready:
            self._group.send(messages.Status(seq=self._control_number()))

    def profile(self, folder: str | None) -> bool:
        if self._group is None or not self._group.is_ready:
            return False
        self._profiled = {}
        seq = self._profile_seq = self._control_number()
        stop_or_start = (
            messages.ProfileStop(seq=seq) if folder is None else messages.ProfileStart(seq=seq, folder=folder)
        )
        self._group.send(stop_or_start)
        return True

    def load_adapter(self, slot: int, memory: AdapterMemory) -> int | None:
        if not self._has_said_ready:
            self._adapters.keep(slot, memory)
            return None
        number = self._control_number()
        self._adapters.load(number, slot, memory, self._steps.slot_of)
        self._send_adapters()
        return number

    def drop_adapter(self, slot: int) -> None:
        self._adapters.drop(slot)

    def host_pools(self) -> Sequence[HostPool]:
        return () if self._group is None else self._group.pools

    def poll(self, timeout_s: float | None) -> list[ExecutorEvent]:
        """Waits for agents, a deadline or a wake-up, and returns an event for each change of an agent's state."""
        events: list[ExecutorEvent] = []
        for key, _ in self._ready_sources(timeout_s):
            handler: Callable[[], list[ExecutorEvent]] = key.data
            try:
                events += handler()
            except AgentError as error:
                events += self._lose(error)
                break
        try:
            if self._is_waiting:
                self._start_group()
            self._check_deadlines()
        except AgentError as error:
            events += self._lose(error)
        return events + self._check_leaving()

    def _ready_sources(self, timeout_s: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """Waits for messages of the agents, a deadline or a wake-up. Returns the sources that are readable.

        After a pause of this process, moves the deadlines by the time of the pause.
        """
        ready = self._selector.select(self._wait_s(timeout_s))
        pause_s = self._pauses.look(time.monotonic())
        if pause_s:
            self._steps.discount(pause_s)
            self._start_pause_s += pause_s
            ready = self._selector.select(0)  # if SIGCONT interrupts a wait, the wait returns no sources
        return ready

    def release(self) -> None:
        if self._group is None or not self._has_said_leaving:
            return
        group, self._group = self._group, None
        self._unregister(group)
        group.shutdown(self._control_number())
        self._steps = self._new_slots(())
        self._has_said_ready = False
        self._adapters.lose()
        self._agent_states.lose()
        self._is_waiting = True
        self.wake()

    def _check_leaving(self) -> list[ExecutorEvent]:
        """Returns ``AgentLeaving``, once, if the agents must leave their machine."""
        group = self._group
        if group is None or not group.is_leaving or self._has_said_leaving:
            return []
        self._has_said_leaving = True
        if not group.is_ready:
            self.release()
            return []
        return [AgentLeaving()]

    def fileno(self) -> int:
        """Returns the descriptor of the selector, with which the engine can wait for several executors together."""
        return self._selector.fileno()

    def next_due(self) -> float | None:
        deadline = self._deadline()
        return None if deadline is None else deadline[0]

    def wake(self) -> None:
        # Another thread may call this method after ``close``. Then the descriptor is -1, which is a ValueError.
        with contextlib.suppress(OSError, ValueError):
            os.eventfd_write(self._wake, 1)

    def agents(self) -> list[dict[str, object]]:
        group = self._group
        return self._agent_states.describe(group.members if group is not None else [])

    def close(self) -> None:
        """Ends the agents and frees their resources. The caller owns the listening sockets."""
        if self._group is not None:
            self._unregister(self._group)
            self._group.shutdown(self._control_number())
            self._group = None
        self._steps = self._new_slots(())
        self._end_last_group()
        self._selector.close()
        wake, self._wake = self._wake, -1
        os.close(wake)

    def _new_slots(self, slots: Sequence[StepSlot]) -> StepSlots:
        config, interval = self._config, self._config.row_check_interval
        answering = len(self._ranks) - config.parallel_config.tensor_parallel  # the first agent of the last stage
        return StepSlots(config.slot_limits(), config.pa_config.block_size, self._ranks, slots, interval, answering)

    def _start_group(self) -> None:
        """Starts the agents. Raises AgentStartError, also if the system has no processes, files or memory left."""
        self._restarts.started()
        self._end_last_group()
        self._start_pause_s = 0.0
        self._has_said_leaving = self._is_waiting = False
        try:
            self._group = self.start_group()
            self._is_waiting = self._group is None
            self._pauses.begin(time.monotonic())
            for source, receive in () if self._group is None else self._group.sources():
                self._selector.register(source, selectors.EVENT_READ, partial(self._on_readable, receive))
        except OSError as error:
            raise AgentStartError(f"{_agents(self._ranks)} could not be started: {error}") from error

    def _end_last_group(self) -> None:
        """Waits for the end of the killed group's processes, so that their memory is free for the next group.
        """
        if self._ending is not None:
            self._ending.close()
            self._ending = None

    def _on_wake(self) -> list[ExecutorEvent]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        return []

    def _on_readable(self, receive: Callable[[], Received]) -> list[ExecutorEvent]:
        assert self._group is not None
        was_ready = self._group.is_ready
        received = receive()
        events = [event for member, message in received if (event := self._on_message(member, message)) is not None]
        if not was_ready:
            self._group.note_progress()
            if self._group.is_ready:
                self._prepare(self._group)
        return events + self._check_ready(self._group)

    def _prepare(self, group: Group) -> None:
        """Prepares this object for steps of ``group``, whose agents have just become ready."""
        self._restarts.ready(time.monotonic())
        self._steps = self._new_slots(group.slots)
        if self._agent_states.is_wanted:
            self.request_status()

    def _check_ready(self, group: Group) -> list[ExecutorEvent]:
        """Returns ``AgentReady``, once, when new agents are ready and have all adapters. Sends missing adapters."""
        if self._has_said_ready or not group.is_ready or self._adapters.is_waiting:
            return []
        for message, memory in self._adapters.again(self._control_number):
            group.load_adapter(message, memory)
        if self._adapters.is_waiting:
            return []
        self._has_said_ready = True
        return [AgentReady(group.summary)]

    def _on_message(self, member: int, message: AgentMessage) -> ExecutorEvent | None:
        if isinstance(message, messages.StepDone | messages.StepFailed):
            result = self._steps.take(member, message)
            if self._adapters.is_loading:
                self._send_adapters()
            return result
        if isinstance(message, messages.Unhealthy):
            raise SelfCheckError(f"agent {self._ranks[member]}: {message.error}", "row", message.seq)
        if isinstance(message, messages.StatusReply):
            assert self._group is not None
            return self._agent_states.add(member, message, self._group.members)
        if isinstance(message, messages.AdapterLoaded):
            answer = self._adapters.take(message)
            if self._adapters.is_loading:
                self._send_adapters()
            return answer
        if isinstance(message, messages.ProfileReply) and message.seq == self._profile_seq:
            self._profiled[member] = {"rank": self._ranks[member], **msgspec.to_builtins(message)}
            if len(self._profiled) == len(self._ranks):
                return AgentProfiled([self._profiled[each] for each in sorted(self._profiled)])
        return None

    def _send_adapters(self) -> None:
        assert self._group is not None
        for message, memory in self._adapters.due(self._steps.slot_of):
            self._group.load_adapter(message, memory)

    def _control_number(self) -> int:
        self._control_seq += 1
        return self._control_seq

    def _lose(self, error: AgentError) -> list[ExecutorEvent]:
        """Ends the group, and plans its restart or gives up. Returns the events for the engine.

        If an agent has reported a step as failed, the event of this step has the agent's error.
        """
        failures = self._steps.join.take_failures() if self._steps.join is not None else []
        events: list[ExecutorEvent] = [StepResult(seq, error=text) for seq, text in failures]
        self._has_said_ready = False
        self._adapters.lose()
        check, step = (error.check, error.step) if isinstance(error, SelfCheckError) else ("", None)
        lost = partial(AgentLost, failed_check=check, step=step, is_drained=isinstance(error, NodeDrainedError))
        self._distrusted = None
        if self._group is not None:
            self._unregister(self._group)
            error = self._group.describe_loss(error)
            self._group.kill()
            self._ending, self._group = self._group, None
        self._steps = self._new_slots(())
        self._agent_states.lose()
        backoff = self._restarts.lost(time.monotonic())
        if backoff is None:
            self._end_last_group()
            suffix = f"; given up after {self._restarts.in_a_row} restarts" if self._restarts.has_been_ready else ""
            return [*events, lost(f"{error}{suffix}", final=True)]
        what = "it" if len(self._ranks) == 1 else f"agents {self._ranks.start} to {self._ranks.stop - 1}"
        return [*events, lost(f"{error}; restarting {what} in {backoff:g} s")]

    def _unregister(self, group: Group) -> None:
        for source, _ in group.sources():
            with contextlib.suppress(KeyError):  # KeyError: the start failed before the source was registered
                self._selector.unregister(source)

    def _deadline(self) -> tuple[float, str] | None:
        """Returns the time of the next deadline, by ``time.monotonic``, and its kind, for example ``restart`` or
        ``step``.

        The kind ``pause`` is the time at which ``PauseWatch`` must look again. Returns None if there is no deadline.
        """
        if self._restarts.due_at is not None:
            return self._restarts.due_at, "restart"
        if self._group is None:
            return None
        own, last_result = self._own_deadline(self._group)
        look, pause = self._group.next_look(last_result), None if own is None else self._pauses.next_look
        others = [(at, kind) for at, kind in ((look, "look"), (pause, "pause")) if at is not None]
        return min(others if own is None else [own, *others], default=None)

    def _own_deadline(self, group: Group) -> tuple[tuple[float, str] | None, float | None]:
        """Returns (deadline, time of the last result). The deadline is a pair: its time and its kind.

        - While the agents start: the deadline of the start, and None.
        - If an agent has failed a step: the deadline for the replies of the other agents, and None.
        - If a step runs: the deadline of this step, and the time of the last result.
        - Otherwise: None, and None.
        """
        settings, steps = self._config.serving_config, self._steps
        if not self._has_said_ready:
            return (group.started_at + self._start_pause_s + settings.agent_start_timeout_s, "start"), None
        if steps.join is not None and (due := steps.join.overdue_at) is not None:
            return (due, "join"), None
        if not steps.slot_of:
            return None, None
        return (steps.waits_since + settings.step_timeout_s, "step"), steps.last_result

    def _wait_s(self, timeout_s: float | None) -> float | None:
        deadline = self._deadline()
        if deadline is None:
            return timeout_s
        until = max(0.0, deadline[0] - time.monotonic())
        return until if timeout_s is None else min(until, timeout_s)

    def _check_deadlines(self) -> None:
        distrusted, self._distrusted = self._distrusted, None
        if distrusted is not None:
            raise distrusted
        join = self._steps.join
        if join is not None and join.torn is not None:
            raise AgentLostError(join.torn)
        if self._group is None or self._own_deadline(self._group)[0] is None:
            self._pauses.rest()
        deadline = self._deadline()
        if deadline is None or (now := time.monotonic()) < deadline[0] or deadline[1] == "pause":
            return
        settings = self._config.serving_config
        if deadline[1] == "restart":
            self._start_group()
        elif deadline[1] == "look":
            assert self._group is not None
            self._group.look(now, self._steps.last_result, self._steps.slot_of.values())
        elif deadline[1] == "join":
            assert join is not None
            join.check_overdue(now)
            raise AgentLostError(str(join.torn))
        elif deadline[1] == "start":
            assert self._group is not None
            ranks = [member.rank for member in self._group.members if not member.is_ready] or list(self._ranks)
            raise AgentStartError(
                f"{_agents(ranks)} {'was' if len(ranks) == 1 else 'were'} not ready after "
                f"{settings.agent_start_timeout_s:g} s (serving_config.agent_start_timeout_s); logs are in "
                f"{self._log_folder}"
            )
        else:
            seq = min(self._steps.slot_of)
            late = list(self._ranks) if join is None else join.missing(seq)
            raise AgentLostError(
                f"{_agents(late)} did not answer step {seq} within {settings.step_timeout_s:g} s "
                "(serving_config.step_timeout_s)"
            )


def _agents(ranks: Sequence[int]) -> str:
    return f"agent{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
