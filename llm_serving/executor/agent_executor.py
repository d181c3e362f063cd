"""The real executor: steps go through shared-memory slots to the agent, which is started again when it dies.

Everything happens inside ``poll``, in the engine's thread: one selector watches the agent's socket, the end of its
process and the wake-up descriptor, so an idle server sleeps until something happens.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llm_serving.config import Config
from llm_serving.errors import AgentError, AgentLostError, AgentStartError
from llm_serving.executor.agent_link import AgentLink, ProgressReport
from llm_serving.executor.base import AgentLost, AgentReady, AgentStatus, ExecutorEvent
from llm_serving.executor.slot_io import SlotWriter, announcement, read_result
from llm_serving.ipc import messages
from llm_serving.ipc.messages import AgentMessage
from llm_serving.ipc.shm import NUM_SLOTS
from llm_serving.scheduler.output import ScheduledStep, StepResult

FIRST_BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 10.0
STABLE_AFTER_S = 60.0
"""An agent that has been ready this long has earned a fresh count of restarts."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    slot: int
    submitted_at: float


class AgentExecutor:
    """Owns the agent's link and the steps in flight. See ``base.Executor`` for the threads' rules."""

    def __init__(
        self,
        config: Config,
        listener: socket.socket,
        log_path: Path,
        report: ProgressReport | None = None,
        agent_module: str = "agent",
    ) -> None:
        self._config = config
        self._listener = listener
        self._log_path = log_path
        self._agent_module = agent_module
        self._report: ProgressReport = report or (lambda rank, stage, done, total: None)
        self._link: AgentLink | None = None
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, self._on_wake)
        self._in_flight: dict[int, _InFlight] = {}
        self._free_slots: list[int] = []
        self._writer = self._new_writer()
        self._control_seq = 0
        self._last_answer = 0.0
        self._restart_at: float | None = None
        self._ready_at: float | None = None
        self._has_been_ready = False
        self._restarts = 0
        self._restarts_in_a_row = 0
        self._status_wanted = False
        self._given_up = False

    def start(self) -> None:
        """Start the agent. ``AgentReady`` or a final ``AgentLost`` follows from ``poll``."""
        self._start_link()

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def submit(self, step: ScheduledStep) -> None:
        """Write the step into a free slot and announce it."""
        assert self._link is not None, "a step was submitted while no agent is ready"
        slot_index = self._free_slots.pop()
        try:
            self._writer.write(step, self._link.memory.slots[slot_index])
        except BaseException:
            self._free_slots.append(slot_index)
            raise
        if not self._in_flight:
            self._last_answer = time.monotonic()
        self._in_flight[step.seq] = _InFlight(slot_index, time.monotonic())
        self._send(announcement(step, slot_index))

    def abort(self, seq: int) -> None:
        if self._link is not None and seq in self._in_flight:
            self._send(messages.Abort(seq=self._control_number(), step=seq))

    def request_status(self) -> None:
        self._status_wanted = True
        if self._link is not None and self._link.ready:
            self._send(messages.Status(seq=self._control_number()))

    def poll(self, timeout_s: float | None) -> list[ExecutorEvent]:
        """Wait for the agent, the clock or a wake-up; whatever befalls the agent becomes an event."""
        events: list[ExecutorEvent] = []
        for key, _ in self._selector.select(self._wait_s(timeout_s)):
            handler: Callable[[], list[ExecutorEvent]] = key.data
            try:
                events += handler()
            except AgentError as error:
                events += self._lose(error)
                break
        try:
            self._check_deadlines()
        except AgentError as error:
            events += self._lose(error)
        return events

    def fileno(self) -> int:
        """The selector's own descriptor: epoll instances nest."""
        return self._selector.fileno()

    def next_due(self) -> float | None:
        deadline = self._deadline()
        return None if deadline is None else deadline[0]

    def wake(self) -> None:
        with contextlib.suppress(OSError, BlockingIOError):
            os.eventfd_write(self._wake, 1)

    def agents(self) -> list[dict[str, object]]:
        link = self._link
        state = (
            "ready" if link and link.ready else "starting" if link else "stopped" if self._given_up else "restarting"
        )
        return [
            {
                "rank": 0,
                "state": state,
                "pid": link.process.pid if link else None,
                "address": "{}:{}".format(*self._listener.getsockname()[:2]),
                "restarts": self._restarts,
                **({"summary": link.summary} if link and link.ready else {}),
            }
        ]

    def close(self) -> None:
        """End the agent and free everything. The listening socket is the caller's."""
        if self._link is not None:
            self._unregister(self._link)
            self._link.shutdown(self._control_number())
            self._link = None
        self._selector.close()
        os.close(self._wake)
        self._wake = -1

    def _start_link(self) -> None:
        self._restart_at = None
        self._link = AgentLink(self._config, 0, self._listener, self._log_path, self._report, self._agent_module)
        self._selector.register(self._link.channel_descriptor, selectors.EVENT_READ, self._on_readable)
        self._selector.register(self._link.process.exit_descriptor, selectors.EVENT_READ, self._on_exit)

    def _on_wake(self) -> list[ExecutorEvent]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        return []

    def _on_exit(self) -> list[ExecutorEvent]:
        assert self._link is not None
        events = self._on_readable()  # its last words, usually the reason, come before its end
        self._link.check_alive()
        return events

    def _on_readable(self) -> list[ExecutorEvent]:
        assert self._link is not None
        was_ready = self._link.ready
        events = [event for message in self._link.receive() if (event := self._on_message(message)) is not None]
        if self._link.ready and not was_ready:
            events.insert(0, self._on_ready())
        return events

    def _on_ready(self) -> AgentReady:
        assert self._link is not None
        self._ready_at = time.monotonic()
        self._has_been_ready = True
        self._free_slots = list(range(NUM_SLOTS))
        self._writer = self._new_writer()
        if self._status_wanted:
            self.request_status()
        return AgentReady(self._link.summary)

    def _on_message(self, message: AgentMessage) -> ExecutorEvent | None:
        if isinstance(message, messages.StepDone):
            return self._finish(message)
        if isinstance(message, messages.StepFailed):
            self._release(message.seq, message.slot)
            return StepResult(message.seq, error=message.error)
        if isinstance(message, messages.StatusReply):
            self._status_wanted = False
            live = {"steps": message.steps, "queued": message.queued, "rss_bytes": message.rss_bytes}
            return AgentStatus([{**self.agents()[0], **live}])
        return None

    def _finish(self, message: messages.StepDone) -> StepResult:
        assert self._link is not None
        self._check_in_flight(message.seq, message.slot)
        times = (message.queue_us, message.graph_us, message.sample_us)
        if message.aborted:
            result = StepResult(message.seq, aborted=True)
        else:
            result = read_result(self._link.memory.slots[message.slot], message.seq, times)
        self._release(message.seq, message.slot)
        return result

    def _release(self, seq: int, slot: int) -> None:
        self._check_in_flight(seq, slot)
        del self._in_flight[seq]
        self._free_slots.append(slot)
        self._last_answer = time.monotonic()

    def _check_in_flight(self, seq: int, slot: int) -> None:
        known = self._in_flight.get(seq)
        if known is None or known.slot != slot:
            raise AgentLostError(f"agent 0 answered step {seq} in slot {slot}, which is not in flight there")

    def _send(self, message: messages.ServerMessage) -> None:
        """A broken connection is not the sender's problem: ``poll`` sees it too, and reports the loss."""
        assert self._link is not None
        with contextlib.suppress(AgentLostError):
            self._link.send(message)

    def _control_number(self) -> int:
        self._control_seq += 1
        return self._control_seq

    def _lose(self, error: AgentError) -> list[ExecutorEvent]:
        """Clear the run away and plan the next, or give up."""
        if self._link is not None:
            self._unregister(self._link)
            self._link.close()
            self._link = None
        self._in_flight.clear()
        self._free_slots.clear()
        now = time.monotonic()
        if self._ready_at is not None and now - self._ready_at >= STABLE_AFTER_S:
            self._restarts_in_a_row = 0
        self._ready_at = None
        limit = self._config.serving_config.agent_restart_limit
        self._given_up = not self._has_been_ready or self._restarts_in_a_row >= limit
        if self._given_up:
            suffix = f"; given up after {self._restarts_in_a_row} restarts" if self._has_been_ready else ""
            return [AgentLost(f"{error}{suffix}", final=True)]
        backoff = min(FIRST_BACKOFF_S * 2**self._restarts_in_a_row, LONGEST_BACKOFF_S)
        self._restart_at = now + backoff
        self._restarts += 1
        self._restarts_in_a_row += 1
        return [AgentLost(f"{error}; restarting it in {backoff:g} s")]

    def _unregister(self, link: AgentLink) -> None:
        self._selector.unregister(link.channel_descriptor)
        self._selector.unregister(link.process.exit_descriptor)

    def _deadline(self) -> tuple[float, str] | None:
        """When something is overdue next, and what it would be."""
        if self._restart_at is not None:
            return self._restart_at, "restart"
        if self._link is not None and not self._link.ready:
            return self._link.started_at + self._config.serving_config.agent_start_timeout_s, "start"
        if self._in_flight:
            return self._last_answer + self._config.serving_config.step_timeout_s, "step"
        return None

    def _wait_s(self, timeout_s: float | None) -> float | None:
        deadline = self._deadline()
        if deadline is None:
            return timeout_s
        until = max(0.0, deadline[0] - time.monotonic())
        return until if timeout_s is None else min(until, timeout_s)

    def _check_deadlines(self) -> None:
        deadline = self._deadline()
        if deadline is None or time.monotonic() < deadline[0]:
            return
        settings = self._config.serving_config
        if deadline[1] == "restart":
            self._start_link()
        elif deadline[1] == "start":
            raise AgentStartError(
                f"agent 0 was not ready after {settings.agent_start_timeout_s:g} s "
                f"(serving_config.agent_start_timeout_s); its log is {self._log_path}"
            )
        else:
            raise AgentLostError(
                f"agent 0 did not answer step {min(self._in_flight)} within {settings.step_timeout_s:g} s "
                "(serving_config.step_timeout_s)"
            )

    def _new_writer(self) -> SlotWriter:
        limits = self._config.slot_limits()
        return SlotWriter(limits, self._config.pa_config.block_size, limits.max_seqs)
