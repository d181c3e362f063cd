"""The steps that have been scheduled and not answered.

What the parts of the scheduler work on together.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from llm_serving.kvcache.kv_cache_manager import BlockCopy, KVCacheManager
from llm_serving.scheduler.intake import RequestQueue
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import BlockMove, MoveKind, ScheduledStep, StepKind, StepReason
from llm_serving.scheduler.queue_order import QueueOrder
from llm_serving.scheduler.running import RunningSet
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.snapshot import Sequences
from llm_serving.telemetry.receipt import WaitingLine

__all__ = ["InFlightStep", "InFlightSteps", "SchedulerState"]


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step and whose it is: ``sequences[i]`` is sequence ``i`` of the step; of a MOVE step, whose blocks move."""

    step: ScheduledStep
    sequences: list[Sequence]
    first_chunk: int
    """Index of the first sequence that computes part of its prompt; those before it decode."""
    copies: list[BlockCopy]
    """Copies the step makes, whose sources it holds."""

    def snapshot(self) -> dict[str, Any]:
        """Returns the step without its tokens. Nobody reads them again."""
        step = self.step
        return {
            "seq": step.seq,
            "kind": step.kind.name,
            "reason": step.reason.name,
            "sequences": [sequence.arrival_index for sequence in self.sequences],
            "rows": step.rows.copy(),
            "query_lens": step.query_lens.copy(),
            "starts": step.starts.copy(),
            "do_sample": step.do_sample.copy(),
            "sample_positions": step.sample_positions.copy(),
            "moves": [[move.kind.name, move.source, move.destination] for move in step.moves],
            "first_chunk": self.first_chunk,
            "copies": [[copy.source, copy.destination] for copy in self.copies],
        }

    @classmethod
    def restored(cls, state: dict[str, Any], sequences: Sequences) -> InFlightStep:
        """Returns the step that ``snapshot`` saved, with zeros in place of its tokens."""
        its_sequences = [sequences[index] for index in state["sequences"]]
        is_move = state["kind"] == StepKind.MOVE.name
        step = ScheduledStep(
            state["seq"],
            StepKind[state["kind"]],
            requests=[] if is_move else [sequence.request for sequence in its_sequences],
            rows=state["rows"],
            token_ids=[0] * sum(state["query_lens"]),
            query_lens=state["query_lens"],
            starts=state["starts"],
            block_tables=[] if is_move else [sequence.block_table for sequence in its_sequences],
            do_sample=state["do_sample"],
            sample_positions=state["sample_positions"],
            restarts=[False] * len(state["rows"]),
            moves=[BlockMove(MoveKind[kind], source, target) for kind, source, target in state["moves"]],
            reason=StepReason[state["reason"]],
        )
        return cls(step, its_sequences, state["first_chunk"], [BlockCopy(*pair) for pair in state["copies"]])


class InFlightSteps:
    """By sequence number, which it gives out. Keeps the sequences' counts of steps in flight, too."""

    def __init__(self) -> None:
        self._steps: dict[int, InFlightStep] = {}
        self.next_seq = 0
        self.num_prefill_steps = 0
        """Mixed ones among them."""
        self.num_decode_steps = 0

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    @property
    def num_compute_steps(self) -> int:
        """All but those that only move blocks."""
        return self.num_prefill_steps + self.num_decode_steps

    def __iter__(self) -> Iterator[InFlightStep]:
        return iter(self._steps.values())

    def latest_first(self) -> Iterator[InFlightStep]:
        return reversed(self._steps.values())

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
        """Take a step up, whose number is ``next_seq``."""
        self._steps[step.seq] = InFlightStep(step, sequences, first_chunk, copies or [])
        self.next_seq += 1
        self._count(step, sequences, 1)
        return step

    def pop(self, seq: int) -> InFlightStep:
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
        """Every step is void. The sequences' counts are the caller's to reset."""
        self._steps.clear()
        self.num_prefill_steps = 0
        self.num_decode_steps = 0

    def snapshot(self) -> dict[str, Any]:
        return {"next_seq": self.next_seq, "steps": [flight.snapshot() for flight in self._steps.values()]}

    def restore(self, state: dict[str, Any], sequences: Sequences) -> None:
        """See ``Stateful``. The sequences' own counts of steps in flight are restored with the sequences."""
        self.next_seq = state["next_seq"]
        flights = [InFlightStep.restored(each, sequences) for each in state["steps"]]
        self._steps = {flight.step.seq: flight for flight in flights}
        kinds = [flight.step.kind for flight in flights]
        self.num_decode_steps = kinds.count(StepKind.DECODE)
        self.num_prefill_steps = len(kinds) - self.num_decode_steps - kinds.count(StepKind.MOVE)


@dataclass(slots=True)
class SchedulerState:
    """The requests by where they are, the steps in flight, and when to look again."""

    limits: SchedulerLimits
    kv_cache: KVCacheManager
    order: QueueOrder
    """Of those in ``waiting`` that have not run yet."""
    waiting: RequestQueue
    running: RunningSet
    in_flight: InFlightSteps
    swapped: list[Sequence] = field(default_factory=list)
    """In order of arrival."""
    line: WaitingLine = field(default_factory=WaitingLine)
    """What holds up those in ``waiting``, for their receipts."""
    num_arrivals: int = 0
    """Requests taken in since the start; the arrival index of the next."""
    num_started: int = 0
    """Requests that have started and not ended, wherever they are now."""
    held_up: tuple[int, int, int] | None = None
    """Changes, free rows and free blocks when the first in line last found no room; see ``is_held_up``."""
    wakeup: float | None = None
    """When something that the last ``schedule`` held back has waited long enough."""

    @property
    def page_use(self) -> float:
        """Share of the blocks that sequences hold, 0 to 1."""
        usable = self.kv_cache.num_usable_blocks
        return (usable - self.kv_cache.num_free_blocks) / usable

    def note_held_up(self) -> None:
        """There is no room for the first in line."""
        self.held_up = (self.running.num_changes, self.running.num_free_rows, self.kv_cache.num_free_blocks)

    @property
    def is_held_up(self) -> bool:
        """Whether nothing has changed for the better since the first in line found no room."""
        if self.held_up is None:
            return False
        num_changes, rows, blocks = self.held_up
        running = self.running
        return (
            num_changes == running.num_changes
            and running.num_free_rows <= rows
            and self.kv_cache.num_free_blocks <= blocks
        )

    def goes_after_preempted(self, sequence: Sequence) -> bool:
        """Whether somebody who was preempted starts, or comes back from the host, before this waiting sequence."""
        if self.running.num_preempted_leaving:
            return True
        is_new = sequence.request.first_scheduled_time is None
        return bool(self.swapped) and (is_new or self.swapped[0].arrival_index < sequence.arrival_index)

    def swap(self, sequence: Sequence) -> None:
        """A sequence's blocks are on the host."""
        insort(self.swapped, sequence, key=_arrival_index)

    def wake_at(self, deadline: float) -> None:
        """Look again then, at the latest."""
        self.wakeup = deadline if self.wakeup is None else min(self.wakeup, deadline)

    def snapshot(self) -> dict[str, Any]:
        return {
            "waiting": self.waiting.snapshot(),
            "running": self.running.snapshot(),
            "in_flight": self.in_flight.snapshot(),
            "swapped": [sequence.arrival_index for sequence in self.swapped],
            "num_arrivals": self.num_arrivals,
            "num_started": self.num_started,
            "held_up": None if self.held_up is None else list(self.held_up),
            "wakeup": self.wakeup,
        }

    def restore(self, state: dict[str, Any], sequences: Sequences) -> None:
        self.waiting.restore(state["waiting"], sequences)
        self.running.restore(state["running"], sequences)
        self.in_flight.restore(state["in_flight"], sequences)
        self.swapped = [sequences[index] for index in state["swapped"]]
        self.num_arrivals, self.num_started = state["num_arrivals"], state["num_started"]
        self.held_up = None if state["held_up"] is None else tuple(state["held_up"])
        self.wakeup = state["wakeup"]


def _arrival_index(sequence: Sequence) -> int:
    return sequence.arrival_index
