"""What becomes of a sequence that has to give up its blocks: computed again, or swapped to the host and back."""

from __future__ import annotations

from llm_serving.scheduler.output import ScheduledStep, StepKind, StepResult
from llm_serving.scheduler.policy import PreemptionKind
from llm_serving.scheduler.sequence import Sequence

__all__ = ["PreemptionChoice"]

_KEEP = 1 - 1 / 32
"""What the past weighs against the next step: about the last 32 count."""


class _Rate:
    """Seconds for each unit of work, the latest steps weighing most."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._units = 0.0

    def note(self, seconds: float, units: int) -> None:
        self._seconds = self._seconds * _KEEP + seconds
        self._units = self._units * _KEEP + units

    @property
    def seconds_per_unit(self) -> float | None:
        """None before anything was measured."""
        return self._seconds / self._units if self._units else None


class PreemptionChoice:
    """Chooses by ``scheduler_config.preemption``; ``auto`` learns from the answers of steps.

    ``auto`` swaps when moving the blocks out and back takes less time than computing the tokens again. What was
    never measured is tried: before the first swap it swaps, and a rate that is old is not known to be wrong.
    """

    def __init__(self, kind: PreemptionKind, block_size: int) -> None:
        self._kind = kind
        self._block_size = block_size
        self._prefill = _Rate()
        self._move = _Rate()

    def prefers_swap(self, sequence: Sequence) -> bool:
        """Whether a running sequence is to be swapped, if the host has room."""
        if self._kind is not PreemptionKind.AUTO:
            return self._kind is PreemptionKind.SWAP
        token_s, block_s = self._prefill.seconds_per_unit, self._move.seconds_per_unit
        if token_s is None or block_s is None:
            return True
        request = sequence.request
        num_blocks = -(-request.num_computed_tokens // self._block_size)
        return 2 * num_blocks * block_s < request.num_computed_tokens * token_s

    def step_answered(self, step: ScheduledStep, result: StepResult) -> None:
        """Learn from a step that has run: what its tokens took, or its blocks."""
        seconds = result.graph_us / 1e6
        if result.aborted or result.error is not None or seconds <= 0.0:
            return
        if step.kind is StepKind.PREFILL or step.kind is StepKind.MIXED:
            self._prefill.note(seconds, step.num_tokens)
        elif step.kind is StepKind.MOVE:
            self._move.note(seconds, len(step.moves))
