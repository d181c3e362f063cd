"""The state that several parts of the scheduler share, and the steps in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from llm_serving.kvcache.block_pool import BlockCopy
from llm_serving.kvcache.kv_cache_manager import KVCacheManager
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import ScheduledStep, StepKind
from llm_serving.scheduler.running import RunningSet
from llm_serving.scheduler.sequence import InFlightStep, Sequence, SequenceState
from llm_serving.scheduler.snapshot import Stateful
from llm_serving.waiting.intake import Intake


@dataclass(slots=True)
class SchedulerState(Stateful):
    """The requests of a scheduler in each state, the steps in flight, and the time of the next wakeup."""

    STATE = ("intake", "running", "in_flight", "swapped", "num_started", "no_capacity", "wakeup")

    limits: SchedulerLimits
    kv_cache: KVCacheManager
    intake: Intake
    """All requests, and the queue of the waiting ones."""
    running: RunningSet
    in_flight: InFlightSteps
    swapped: list[Sequence] = field(default_factory=list)
    """The swapped sequences, in order of arrival."""
    num_started: int = 0
    """Number of requests that have started and not ended, in any state."""
    no_capacity: tuple[int, int, int] | None = None
    """The state when the first waiting request last lacked capacity: ``RunningSet.num_changes``, free batch rows and
    free blocks. None if it did not lack capacity, or if a request has ended since."""
    wakeup: float | None = None
    """Time in seconds until which a request or a step is held back. ``schedule`` must be called again at this time.
    None if nothing is held back."""
    may_have_drafts: bool = False
    """True once drafts were offered. Until then, no code looks for the drafts of a sequence."""

    @property
    def page_use(self) -> float:
        """Fraction of the blocks that block tables or copies hold, from 0 to 1."""
        usable = self.kv_cache.num_usable_blocks
        return (usable - self.kv_cache.num_free_blocks) / usable

    def note_no_capacity(self) -> None:
        """Records that the first waiting request could not start, because no batch row or too few blocks are free."""
        self.no_capacity = (self.running.num_changes, self.running.num_free_rows, self.kv_cache.num_free_blocks)

    def goes_after_preempted(self, sequence: Sequence) -> bool:
        """Returns True if a waiting sequence must not start before a preempted sequence has continued."""
        if self.running.has_preempted_leaving:
            return True
        is_new = sequence.request.first_scheduled_time is None
        return bool(self.swapped) and (is_new or self.swapped[0].arrival_index < sequence.arrival_index)

    def note_ended(self, sequence: Sequence) -> None:
        """Records that a request has ended while it was waiting or swapped."""
        sequence.state = SequenceState.REMOVED
        sequence.request.end_tiles()
        self.num_started -= sequence.request.first_scheduled_time is not None
        self.no_capacity = None  # check capacity again, because this request may be the one that lacked it

    def wake_at(self, deadline: float) -> None:
        """Ensures that ``schedule`` is called at ``deadline`` at the latest."""
        self.wakeup = deadline if self.wakeup is None else min(self.wakeup, deadline)


class InFlightSteps(Stateful):
    """The steps in flight by number. ``add`` and ``pop`` also update each sequence's counts of its steps in flight."""

    STATE = ("_steps", "next_seq", "num_prefill_steps", "num_decode_steps")

    def __init__(self) -> None:
        self._steps: dict[int, InFlightStep] = {}
        self.next_seq = 0
        """Number of the next step."""
        self.note_added: Callable[[InFlightStep], None] | None = None
        self.num_prefill_steps = 0
        """Number of prefill and mixed steps in flight."""
        self.num_decode_steps = 0

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    @property
    def num_compute_steps(self) -> int:
        """Number of steps in flight without MOVE steps, which only copy blocks."""
        return self.num_prefill_steps + self.num_decode_steps

    def __iter__(self) -> Iterator[InFlightStep]:
        return iter(self._steps.values())

    def __contains__(self, seq: int) -> bool:
        return seq in self._steps

    def add(
        self,
        step: ScheduledStep,
        sequences: list[Sequence],
        *,
        first_chunk: int = 0,
        copies: list[BlockCopy] | None = None,
    ) -> ScheduledStep:
        """Adds ``step``, whose number is ``next_seq``, to the steps in flight, and returns it."""
        flight = self._steps[step.seq] = InFlightStep(step, sequences, first_chunk, copies or [])
        if self.note_added is not None:
            self.note_added(flight)
        self.next_seq += 1
        self._count(step, sequences, 1)
        return step

    def pop(self, seq: int) -> InFlightStep:
        """Removes and returns the step with the number ``seq``."""
        flight = self._steps.pop(seq)
        self._count(flight.step, flight.sequences, -1)
        return flight

    def _count(self, step: ScheduledStep, sequences: list[Sequence], change: int) -> None:
        if step.kind is StepKind.DECODE:
            self.num_decode_steps += change
            for sequence in sequences:
                sequence.num_inflight_steps += change
                sequence.num_inflight_decodes += change
                sequence.request.num_inflight_tokens += change
        elif step.kind is StepKind.MOVE:
            for sequence in sequences:
                sequence.num_inflight_steps += change
        else:
            self.num_prefill_steps += change
            for sequence, do_sample in zip(sequences, step.do_sample, strict=True):
                sequence.num_inflight_steps += change
                sequence.request.num_inflight_tokens += change * do_sample

    def clear(self) -> None:
        """Removes all steps. The caller must reset the sequences' counts of steps in flight."""
        self._steps.clear()
        self.num_prefill_steps = 0
        self.num_decode_steps = 0
