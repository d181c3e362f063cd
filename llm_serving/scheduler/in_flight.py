"""The steps that have been scheduled and not answered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llm_serving.kvcache.kv_cache_manager import BlockCopy
from llm_serving.scheduler.output import ScheduledStep, StepKind
from llm_serving.scheduler.sequence import Sequence

__all__ = ["InFlightStep", "InFlightSteps"]


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step and whose it is: ``sequences[i]`` is sequence ``i`` of the step; of a MOVE step, whose blocks move."""

    step: ScheduledStep
    sequences: list[Sequence]
    first_chunk: int
    """Index of the first sequence that computes part of its prompt; those before it decode."""
    copies: list[BlockCopy]
    """Copies the step makes, whose sources it holds."""


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
