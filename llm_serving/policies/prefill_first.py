"""Policy ``prefill_first``, the default, and the base class of policies whose prompts go first."""

from __future__ import annotations

from abc import abstractmethod

from llm_serving.policies.base import SchedulingPolicy
from llm_serving.scheduler.composer import StepComposer
from llm_serving.scheduler.output import ScheduledStep, StepKind, StepReason, StepResult
from llm_serving.scheduler.state import SchedulerState


class PromptsFirst(SchedulingPolicy):
    """Chooses a prefill step if a prompt can start or continue, else a decode step.

    After ``prefill_streak_limit`` consecutive prefill steps that delayed decoding sequences, a decode step comes first.
    """

    STATE = ("_streak",)

    def __init__(self, state: SchedulerState, composer: StepComposer) -> None:
        super().__init__(state, composer)
        self._streak = 0
        self._streak_limit = prefill_streak_limit(state.limits.max_num_seqs, state.limits.prefill_batch_size)

    def next_step(self, now: float) -> ScheduledStep | None:
        if self._streak < self._streak_limit:
            return self._prefill(now) or self._decode(now, StepReason.ROWS_READY)
        step = self._decode(now, StepReason.ROWS_OVERDUE)
        if step is None and not self._state.in_flight.num_steps:
            step = self._prefill(now)
        return step

    def step_completed(self, step: ScheduledStep, result: StepResult) -> None:
        if step.kind is StepKind.DECODE:
            self._streak = 0

    def reset(self) -> None:
        self._streak = 0

    @abstractmethod
    def _is_decode_due(self) -> bool:
        """Returns True if a decode step may be composed now. It may not if too many steps are in flight."""

    def _prefill(self, now: float) -> ScheduledStep | None:
        step = self._composer.prefill(now, StepReason.PROMPT_READY)
        if step is not None:
            self._streak += self._delays_decoding(step)
        return step

    def _decode(self, now: float, reason: StepReason) -> ScheduledStep | None:
        if not self._state.running or not self._is_decode_due():
            return None
        return self._composer.decode(now, reason)

    def _delays_decoding(self, prefill: ScheduledStep) -> bool:
        """Returns True if ``prefill`` delays the next token of a decoding sequence."""
        return self._state.in_flight.num_decode_steps > 0 or any(
            sequence.wants_token and sequence.request not in prefill.requests for sequence in self._state.running
        )


def prefill_streak_limit(max_num_seqs: int, prefill_batch_size: int) -> int:
    """Returns the maximum number of consecutive prefill steps that may delay decoding sequences.

    It is the number of prefill steps that fill all batch rows with new requests. So a burst of requests starts quickly,
    but an endless stream of short requests cannot stop the decoding sequences.
    """
    return -(-max_num_seqs // prefill_batch_size)


class PrefillFirst(PromptsFirst):
    """``prefill_first``: the prefill of a new request begins as soon as the running step ends.

    The agent runs queued prefill steps before queued decode steps. While prefill steps are queued, decoding sequences
    wait. They decode in larger batches later, which increases the throughput. A decode step is composed only when at
    most ``decode_steps_ahead`` steps are in flight. A step composed earlier would only wait in the agent's queue,
    without the sequences that become ready meanwhile.
    """

    def _is_decode_due(self) -> bool:
        return self._state.in_flight.num_compute_steps <= self._state.limits.decode_steps_ahead
