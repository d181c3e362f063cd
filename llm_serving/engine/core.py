"""The step loop: one thread that asks the scheduler for steps, hands them to the executor and spreads the answers.

The thread sleeps in ``executor.poll`` whenever there is nothing to do. Everything else it has to know arrives
through ``submit``: requests, aborts, probes.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from llm_serving.engine.observer import EngineLog, EngineMetrics
from llm_serving.engine.outputs import DetokenizerFactory, EngineOutput, ProbeAnswer, RequestRefused
from llm_serving.engine.request_tracker import RequestTracker
from llm_serving.engine.status import EngineState, EngineStatus, StateLine
from llm_serving.errors import AgentLostError, LLMServingError, ProtocolError, QueueFullError, RequestError
from llm_serving.executor.base import AgentLost, AgentReady, AgentStatus, Executor, ExecutorEvent
from llm_serving.request import Request
from llm_serving.scheduler.output import ScheduledStep, StepResult
from llm_serving.scheduler.scheduler import Scheduler

__all__ = ["Abort", "Add", "Command", "EngineCore", "Probe", "Stop"]


@dataclass(frozen=True, slots=True)
class Add:
    """Serve a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody wants the rest of a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the agents whether they are there; answered by ``ProbeAnswer`` when they all are."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End every request with an error, then the loop."""

    reason: str = "the server is shutting down"


Command = Add | Abort | Probe | Stop


class EngineCore:
    """Owned by its thread, but for ``submit``, ``status`` and the public attributes, which any thread may use."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        detokenizer: DetokenizerFactory,
        log: EngineLog,
        metrics: EngineMetrics,
        deliver: Callable[[list[EngineOutput]], None],
        *,
        state_interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = EngineState.STARTING
        self.stop_reason = ""
        self.ended = False
        """What is submitted from now on may never be looked at: who submits looks here afterwards."""
        self._scheduler = scheduler
        self._executor = executor
        self._log = log
        self._metrics = metrics
        self._deliver = deliver
        self._clock = clock
        self._tracker = RequestTracker(scheduler, detokenizer, log)
        self._state_line = StateLine(scheduler, state_interval_s)
        self._commands: deque[Command] = deque()
        self._outputs: list[EngineOutput] = []
        self._sent: dict[int, tuple[ScheduledStep, float]] = {}
        self._dropped: set[int] = set()
        self._wakeup: float | None = None
        self._running = True
        self._was_idle = True
        self._num_steps = 0
        self._num_answered = 0
        self._num_just_sent = 0
        self._preemptions_reported = 0
        self._swaps_reported = 0
        self._last_answer: float | None = None

    # Any thread

    def submit(self, command: Command) -> None:
        """Hand the engine thread something to do, and wake it."""
        self._commands.append(command)
        self._executor.wake()

    def status(self) -> EngineStatus:
        """A picture of the moment; its numbers may be a step apart from one another."""
        last = self._last_answer
        age = None if last is None else max(0.0, self._clock() - last)
        return EngineStatus.of(self.state, self._scheduler, self._executor.agents(), self._num_steps, age)

    def queue_full(self) -> QueueFullError | None:
        """Why one more request would be refused, as far as can be told without asking the scheduler's thread; None
        when it may be taken. Cheap, so that under overload a request need not be read to be refused."""
        return self._scheduler.queue_full()

    # The engine thread

    def run(self) -> None:
        """Step until ``Stop``. An error that no request can be blamed for ends all requests, and the engine."""
        try:
            while self._running:
                self.step()
        except Exception as error:
            self.state = EngineState.STOPPED
            self.stop_reason = f"the engine stopped on an internal error: {error!r}"
            self._log.error(self.stop_reason, traceback=traceback.format_exc())
            self._outputs += self._tracker.abandon_all(self.stop_reason, self._clock())
        self.ended = True
        while self._commands:
            if isinstance(command := self._commands.popleft(), Add):
                self._add(command.request, self._clock())
        self._hand_over()

    def step(self) -> None:
        """Wait for something to happen, then act on all of it and keep the agents supplied."""
        events = self._executor.poll(self._poll_timeout())
        now = self._clock()
        self._take_commands(now)
        for event in events:
            self._take_event(event, now)
        if self._sent:
            self._hand_over()  # the device is at work on another step: clients first
        self._send_steps(now)
        self._outputs += self._tracker.take_ended(now)
        self._note_host_overhead(now)
        self._hand_over()
        self._look_after(now)

    def _poll_timeout(self) -> float | None:
        if self._commands:
            return 0.0
        times = [due for due in (self._wakeup, self._state_line.due) if due is not None]
        return max(0.0, min(times) - self._clock()) if times else None

    def _take_commands(self, now: float) -> None:
        aborts = False
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Add):
                self._add(command.request, now)
            elif isinstance(command, Abort):
                self._outputs += self._tracker.abort(command.request_id, now)
                aborts = True
            elif isinstance(command, Probe):
                self._executor.request_status()
            else:
                self._give_up(command.reason, now)
                self._running = False
        if aborts:
            self._drop_void_steps()

    def _take_event(self, event: ExecutorEvent, now: float) -> None:
        if isinstance(event, StepResult):
            self._take_result(event, now)
        elif isinstance(event, AgentReady):
            self.state = EngineState.READY
            self._log.event("agent_ready", summary=dict(event.summary))
        elif isinstance(event, AgentLost):
            self._lose_agent(event, now)
        elif isinstance(event, AgentStatus):
            self._outputs.append(ProbeAnswer())

    def _take_result(self, result: StepResult, now: float) -> None:
        try:
            updates = self._scheduler.update(result, now)
        except ProtocolError as error:
            self._log.error(str(error), step=result.seq)
            return
        step, sent = self._sent.pop(result.seq)
        self._dropped.discard(result.seq)
        if result.error is not None:
            self._log.error("a step failed", step=result.seq, reason=result.error)
        outputs = self._tracker.outputs(updates, result, now)
        self._outputs += outputs
        if result.aborted:
            return
        self._metrics.step(step, result, now - sent)
        self._num_answered += 1
        if result.error is None:
            self._num_steps += 1
            self._last_answer = now
            self._state_line.step(step, len(outputs), now)

    def _send_steps(self, now: float) -> None:
        """Hand over every step that can be scheduled. Without a free slot the next answer brings us back here."""
        self._wakeup = None
        self._num_just_sent = 0
        if self.state is not EngineState.READY:
            return
        while self._executor.num_free_slots > 0:
            step = self._scheduler.schedule(now)
            if step is None:
                self._wakeup = self._scheduler.next_wakeup(now)
                return
            self._sent[step.seq] = (step, now)
            self._num_just_sent += 1
            try:
                self._executor.submit(step)
            except Exception as error:
                # The step's requests end, the others go on; not an error of the engine.
                self._log.error("a step could not be sent", step=step.seq, traceback=traceback.format_exc())
                self._take_result(StepResult(step.seq, error=f"the step could not be sent: {error}"), now)

    def _note_host_overhead(self, now: float) -> None:
        """One value for each step answered since ``now``, when ``poll`` returned."""
        answered, self._num_answered = self._num_answered, 0
        if not answered or not self._sent:
            return
        self._metrics.host_overhead(self._clock() - now if len(self._sent) == self._num_just_sent else 0.0)
        for _ in range(answered - 1):
            self._metrics.host_overhead(0.0)  # the device went on with the other

    def _hand_over(self) -> None:
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._deliver(outputs)

    def _look_after(self, now: float) -> None:
        """Integrity on going idle, and the periodic line."""
        scheduler = self._scheduler
        preemptions = scheduler.num_preemptions - self._preemptions_reported
        swaps = scheduler.num_swaps - self._swaps_reported
        if preemptions or swaps:
            self._preemptions_reported += preemptions
            self._swaps_reported += swaps
            self._metrics.preemptions(preemptions, swaps)
        idle = scheduler.is_idle
        if idle and not self._was_idle:
            self._check_integrity()
        self._was_idle = idle
        due = self._state_line.due
        if due is not None and due <= now:
            self._log.event("engine_state", **self._state_line.take(now))

    def _check_integrity(self) -> None:
        try:
            self._scheduler.check_integrity()
        except AssertionError as error:
            self._log.error("the scheduler leaks", reason=str(error))

    # Requests and agents

    def _add(self, request: Request, now: float) -> None:
        try:
            if self.state is EngineState.STOPPED:
                raise AgentLostError(f"requests are not served any more: {self.stop_reason}")
            self._tracker.add(request)
        except LLMServingError as error:
            self._refuse(request, error)
        except Exception as error:
            self._log.error("a request could not be taken in", traceback=traceback.format_exc())
            self._refuse(request, LLMServingError(f"the request could not be taken in: {error!r}"))
        else:
            self._state_line.changed(now)
            self._was_idle = False

    def _refuse(self, request: Request, error: LLMServingError) -> None:
        self._metrics.request_refused(error.code if isinstance(error, RequestError) else "internal_error")
        self._outputs.append(RequestRefused(request.request_id, error))

    def _drop_void_steps(self) -> None:
        for seq in self._scheduler.void_steps():
            if seq not in self._dropped:
                self._dropped.add(seq)
                self._executor.abort(seq)

    def _lose_agent(self, event: AgentLost, now: float) -> None:
        """Every step in flight is void; its requests wait to be recomputed, or end with the agent."""
        self._sent.clear()
        self._dropped.clear()
        self._scheduler.agent_lost(now)
        self._log.error(event.error, event="agent_lost", final=event.final, requests=self._scheduler.num_waiting)
        if event.final:
            self._give_up(f"the agent was lost and is not restarted: {event.error}", now)
        elif self.state is EngineState.READY:
            self.state = EngineState.RECOVERING

    def _give_up(self, reason: str, now: float) -> None:
        if self.state is not EngineState.STOPPED:
            self.state, self.stop_reason = EngineState.STOPPED, reason
        self._outputs += self._tracker.fail_all(reason, now)
