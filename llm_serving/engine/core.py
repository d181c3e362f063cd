"""The step loop: one thread that asks schedulers for steps, hands them to executors and spreads the answers.

There is one scheduler and one executor for each replica of the model. The thread sleeps until one of the executors has
something to give, so none waits for another; all else it has to know arrives through ``submit``: requests, aborts,
probes.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llm_serving.engine.observer import EngineLog, EngineMetrics
from llm_serving.engine.outputs import DetokenizerFactory, EngineOutput, ProbeAnswer, RequestRefused
from llm_serving.engine.replica import Replica
from llm_serving.engine.request_tracker import RequestTracker
from llm_serving.engine.status import EngineState, EngineStatus, StateLine
from llm_serving.errors import AgentLostError, LLMServingError, QueueFullError, RequestError
from llm_serving.executor.base import AgentLost, AgentReady, Executor, ExecutorEvent
from llm_serving.executor.waiting import Poll, poll_all
from llm_serving.request import Request
from llm_serving.routing.router import Router
from llm_serving.scheduler.output import StepResult
from llm_serving.scheduler.protocols import RequestFront, StepSource

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
    """Owned by its thread, but for ``submit``, ``status`` and the public attributes, which any thread may use.

    ``front`` takes requests in. ``replicas``: where each replica's steps come from and go to; a single one's scheduler
    is the front itself, several stand behind a ``Router``. ``poll``: how to wait for their executors.
    """

    def __init__(
        self,
        front: RequestFront,
        replicas: Sequence[tuple[StepSource, Executor]],
        detokenizer: DetokenizerFactory,
        log: EngineLog,
        metrics: EngineMetrics,
        deliver: Callable[[list[EngineOutput]], None],
        *,
        state_interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        poll: Poll | None = None,
    ) -> None:
        self.state = EngineState.STARTING
        self.stop_reason = ""
        self.ended = False
        """What is submitted from now on may never be looked at: who submits looks here afterwards."""
        self._front = front
        self._router = front if isinstance(front, Router) else None
        self._log = log
        self._metrics = metrics
        self._deliver = deliver
        self._clock = clock
        self._tracker = RequestTracker(front, detokenizer, log)
        self._state_line = StateLine(front, state_interval_s)
        executors = [executor for _, executor in replicas]
        self._poll = poll_all(executors) if poll is None else poll
        self._wake = executors[0].wake
        self._replicas = [
            Replica(index, scheduler, executor, self._tracker, self._state_line, log, metrics, named=len(replicas) > 1)
            for index, (scheduler, executor) in enumerate(replicas)
        ]
        self._commands: deque[Command] = deque()
        self._outputs: list[EngineOutput] = []
        self._probed: set[int] = set()
        self._running = True
        self._was_idle = True

    # Any thread

    def submit(self, command: Command) -> None:
        """Hand the engine thread something to do, and wake it."""
        self._commands.append(command)
        self._wake()

    def status(self) -> EngineStatus:
        """A picture of the moment; its numbers may be a step apart from one another."""
        answers = [replica.last_answer for replica in self._replicas if replica.last_answer is not None]
        age = max(0.0, self._clock() - max(answers)) if answers else None
        return EngineStatus.of(self.state, self._front.figures, self._replicas, age)

    def queue_full(self) -> QueueFullError | None:
        """Why one more request would be refused, as far as can be told without asking the scheduler's thread; None
        when it may be taken. Cheap, so that under overload a request need not be read to be refused."""
        return self._front.queue_full()

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
        events = self._poll(self._poll_timeout())
        now = self._clock()
        replicas = self._replicas if self._commands else self._concerned(events, now)
        self._take_commands(now)
        for index, event in events:
            self._take_event(self._replicas[index], event, now)
        if any(replica.is_at_work for replica in self._replicas):
            self._hand_over()  # a device is at work on another step: clients first
        self._send_steps(replicas, now)
        self._outputs += self._tracker.take_ended(now)
        for replica in replicas:
            replica.note_host_overhead(now, self._clock)
        self._hand_over()
        self._look_after(now)

    def _concerned(self, events: list[tuple[int, ExecutorEvent]], now: float) -> list[Replica]:
        """Replicas for which there may be a step where there was none. What one has lost may be for any other."""
        replicas = self._replicas
        if len(replicas) == 1 or any(isinstance(event, AgentLost) for _, event in events):
            return replicas
        indices = {index for index, _ in events}
        return [one for one in replicas if one.index in indices or (one.wakeup is not None and one.wakeup <= now)]

    def _poll_timeout(self) -> float | None:
        if self._commands:
            return 0.0
        times = [replica.wakeup for replica in self._replicas if replica.wakeup is not None]
        if (due := self._state_line.due) is not None:
            times.append(due)
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
                self._probe()
            else:
                self._give_up(command.reason, now)
                self._running = False
        if aborts:
            for replica in self._replicas:
                replica.drop_void_steps()

    def _take_event(self, replica: Replica, event: ExecutorEvent, now: float) -> None:
        if isinstance(event, StepResult):
            self._outputs += replica.take_result(event, now)
        elif isinstance(event, AgentReady):
            self._agent_ready(replica, event)
        elif isinstance(event, AgentLost):
            self._lose_agent(replica, event, now)
        else:
            self._answer_probe(replica)

    def _send_steps(self, replicas: Sequence[Replica], now: float) -> None:
        for replica in replicas:
            self._outputs += replica.send_steps(now)
        # While steps were made for one replica, a request may have gone to another.
        while self._router is not None and (placed := self._router.take_placed()):
            for index in placed:
                self._outputs += self._replicas[index].send_steps(now)

    def _hand_over(self) -> None:
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._deliver(outputs)

    def _look_after(self, now: float) -> None:
        """Integrity on going idle, and the periodic line."""
        for replica in self._replicas:
            replica.note_preemptions()
        idle = self._front.is_idle
        if idle and not self._was_idle:
            self._check_integrity()
        self._was_idle = idle
        due = self._state_line.due
        if due is not None and due <= now:
            self._log.event("engine_state", **self._state_line.take(now))

    def _check_integrity(self) -> None:
        try:
            self._front.check_integrity()
        except AssertionError as error:
            self._log.error("the scheduler leaks", reason=str(error))

    # Requests

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

    # Agents

    def _probe(self) -> None:
        """Ask those who are to answer: who serves, or where nobody does, all."""
        asked = [replica for replica in self._replicas if replica.is_ready] or self._replicas
        self._probed = {replica.index for replica in asked}
        for replica in asked:
            replica.executor.request_status()

    def _answer_probe(self, replica: Replica) -> None:
        """One is there, or gone; with the last of those asked the answer is complete."""
        if replica.index in self._probed:
            self._probed.remove(replica.index)
            if not self._probed:
                self._outputs.append(ProbeAnswer())

    def _agent_ready(self, replica: Replica, event: AgentReady) -> None:
        """Serves from now on. The engine is ready when every replica has been so once."""
        replica.is_ready = replica.was_ready = True
        if self._router is not None:
            self._router.agent_ready(replica.index)
        if self.state is not EngineState.STOPPED and all(other.was_ready for other in self._replicas):
            self.state = EngineState.READY
        self._log.event("agent_ready", summary=dict(event.summary), **replica.log_fields)

    def _lose_agent(self, replica: Replica, event: AgentLost, now: float) -> None:
        """Every step in flight there is void; its requests are computed again, by others or when it is back, or end
        with the last replica. One that cannot even start says that none could."""
        replica.lose(now, final=event.final)
        waiting = self._front.figures.num_waiting
        self._log.error(event.error, event="agent_lost", final=event.final, requests=waiting, **replica.log_fields)
        if event.final and (not replica.was_ready or all(other.is_given_up for other in self._replicas)):
            self._give_up(f"the agent was lost and is not restarted: {event.error}", now)
        elif self.state is EngineState.READY and not any(other.is_ready for other in self._replicas):
            self.state = EngineState.RECOVERING
        if len(self._probed) > 1:
            self._answer_probe(replica)

    def _give_up(self, reason: str, now: float) -> None:
        if self.state is not EngineState.STOPPED:
            self.state, self.stop_reason = EngineState.STOPPED, reason
        self._outputs += self._tracker.fail_all(reason, now)
