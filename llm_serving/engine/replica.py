"""One replica in the step loop: a scheduler that makes steps, and the executor that carries them to its agents."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from llm_serving.engine.observer import EngineLog, EngineMetrics
from llm_serving.engine.request_tracker import RequestTracker
from llm_serving.engine.status import StateLine
from llm_serving.errors import ProtocolError
from llm_serving.executor.base import Executor
from llm_serving.request import RequestOutput
from llm_serving.scheduler.output import ScheduledStep, StepResult
from llm_serving.scheduler.protocols import StepSource

__all__ = ["Replica"]


class Replica:
    """Owned by the engine's thread. ``named``: log lines say which replica it is."""

    def __init__(
        self,
        index: int,
        scheduler: StepSource,
        executor: Executor,
        tracker: RequestTracker,
        state_line: StateLine,
        log: EngineLog,
        metrics: EngineMetrics,
        *,
        named: bool,
    ) -> None:
        self.index = index
        self.scheduler = scheduler
        self.executor = executor
        self.log_fields: dict[str, Any] = {"replica": index} if named else {}
        self.is_ready = False
        """Steps may be sent."""
        self.was_ready = False
        self.is_given_up = False
        """Its agents are lost and not restarted."""
        self.wakeup: float | None = None
        """When to ask for steps again though nothing has happened."""
        self.num_steps = 0
        """Answered without an error, since the start."""
        self.last_answer: float | None = None
        self._tracker = tracker
        self._state_line = state_line
        self._log = log
        self._metrics = metrics
        self._figures = scheduler.figures
        self._sent: dict[int, tuple[ScheduledStep, float]] = {}
        self._dropped: set[int] = set()
        self._num_answered = 0
        self._num_just_sent = 0
        self._preemptions_reported = 0
        self._swaps_reported = 0

    @property
    def is_at_work(self) -> bool:
        """Steps are with the agents."""
        return bool(self._sent)

    @property
    def state(self) -> str:
        """For people."""
        if self.is_ready:
            return "ready"
        return "stopped" if self.is_given_up else "recovering" if self.was_ready else "starting"

    def take_result(self, result: StepResult, now: float) -> list[RequestOutput]:
        """The answer to a step; what it means for its requests' streams."""
        try:
            updates = self.scheduler.update(result, now)
        except ProtocolError as error:
            self._log.error(str(error), step=result.seq, **self.log_fields)
            return []
        step, sent = self._sent.pop(result.seq)
        self._dropped.discard(result.seq)
        if result.error is not None:
            self._log.error("a step failed", step=result.seq, reason=result.error, **self.log_fields)
        outputs = self._tracker.outputs(updates, result, now)
        if result.aborted:
            return outputs
        self._metrics.step(step, result, now - sent)
        self._num_answered += 1
        if result.error is None:
            self.num_steps += 1
            self.last_answer = now
            self._state_line.step(step, len(outputs), now)
        return outputs

    def send_steps(self, now: float) -> list[RequestOutput]:
        """Hand over every step that can be scheduled; the ends of requests whose step could not be sent. Without a
        free slot the next answer brings us back here."""
        self.wakeup = None
        outputs: list[RequestOutput] = []
        if not self.is_ready:
            return outputs
        executor, scheduler = self.executor, self.scheduler
        while executor.num_free_slots > 0:
            step = scheduler.schedule(now)
            if step is None:
                self.wakeup = scheduler.next_wakeup(now)
                break
            self._sent[step.seq] = (step, now)
            self._num_just_sent += 1
            try:
                executor.submit(step)
            except Exception as error:
                # The step's requests end, the others go on; not an error of the engine.
                self._log.error(
                    "a step could not be sent", step=step.seq, traceback=traceback.format_exc(), **self.log_fields
                )
                failed = StepResult(step.seq, error=f"the step could not be sent: {error}")
                outputs += self.take_result(failed, now)
        return outputs

    def note_host_overhead(self, now: float, clock: Callable[[], float]) -> None:
        """One value for each step answered since ``now``, when ``poll`` returned."""
        answered, self._num_answered = self._num_answered, 0
        sent, self._num_just_sent = self._num_just_sent, 0
        if not answered or not self._sent:
            return
        self._metrics.host_overhead(clock() - now if len(self._sent) == sent else 0.0)
        for _ in range(answered - 1):
            self._metrics.host_overhead(0.0)  # the device went on with the other

    def note_preemptions(self) -> None:
        """Tell the metrics of those since the last call."""
        figures = self._figures
        preemptions = figures.num_preemptions - self._preemptions_reported
        swaps = figures.num_swaps - self._swaps_reported
        if preemptions or swaps:
            self._preemptions_reported += preemptions
            self._swaps_reported += swaps
            self._metrics.preemptions(preemptions, swaps)

    def drop_void_steps(self) -> None:
        """Ask the agents to drop queued steps that nobody wants any more."""
        for seq in self.scheduler.void_steps():
            if seq not in self._dropped:
                self._dropped.add(seq)
                self.executor.abort(seq)

    def lose(self, now: float, *, final: bool) -> None:
        """The agents are gone: every step in flight is void, its requests wait to be computed again."""
        self.is_ready = False
        self.is_given_up = final
        self._sent.clear()
        self._dropped.clear()
        self.scheduler.agent_lost(now)
