"""Scheduling policies: which kind of step comes next (``scheduler_config.policy``).

All policies batch continuously and admit in the order of the queue; they differ in what goes first, prompts or rows
that decode, and so in who waits. What they may not differ in is a single token of any answer.

What ``prefill_first`` and ``fcfs`` have in common: a prefill step as soon as there can be one.

``prefill_first``: a new request gets its first token as soon as the step that is running ends.

The agent runs queued prefill steps before queued decode steps. Running requests stand still while prefills are
queued (bounded, see ``prefill_streak_limit``), then decode in larger batches, which is where throughput comes from.

``fcfs``: steps run in the order they were scheduled, prefill and decode take turns.

A prefill never overtakes a decode step queued before it, and at most ``MAX_PREFILL_STEPS_IN_FLIGHT`` prefills come
between two decodes: running requests keep a steady pace, new ones wait a little longer for their first token.

``decode_first``: running requests go on at full pace, new ones start when no row can decode.

The shortest time between tokens there is, and the longest wait for the first. The agent runs queued decode steps
before queued prefill steps.

``chunked``: every step holds all rows that can decode, and prompts fill the rest of a token budget.

Stall-free batching (Sarathi-Serve, Agrawal et al. 2024): no row ever waits for a whole prompt, and the time between
tokens is bounded by the time of a step of ``chunk_tokens`` tokens. Steps run in the order they were scheduled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

from llm_serving.scheduler.decode_steps import DecodeComposer
from llm_serving.scheduler.output import ScheduledStep, StepKind, StepReason, StepResult
from llm_serving.scheduler.prefill_steps import MixedComposer, PrefillComposer
from llm_serving.scheduler.snapshot import Sequences
from llm_serving.scheduler.state import SchedulerState

__all__ = [
    "DECODE_STREAK_LIMIT",
    "Chunked",
    "DecodeFirst",
    "Fcfs",
    "PrefillFirst",
    "PromptsFirst",
    "SchedulingPolicy",
    "StepComposers",
    "prefill_streak_limit",
]


@dataclass(frozen=True, slots=True)
class StepComposers:
    """What a policy chooses from."""

    prefills: PrefillComposer
    decodes: DecodeComposer
    mixed: MixedComposer

    def snapshot(self) -> list[Any]:
        return [self.decodes.snapshot(), self.mixed.snapshot()]

    def restore(self, state: list[Any], sequences: Sequences) -> None:
        decodes, mixed = state
        self.decodes.restore(decodes)
        self.mixed.restore(mixed)


class SchedulingPolicy(Protocol):
    """Asked for a step whenever one may be sent, told of every answer."""

    def __init__(self, state: SchedulerState, composers: StepComposers) -> None: ...

    def next_step(self, now: float) -> ScheduledStep | None:
        """The step to send now, or None: there is nothing to run, or enough is in flight."""

    def step_answered(self, step: ScheduledStep, result: StepResult) -> None:
        """A step was answered; it may have failed, or been dropped before it began."""

    def reset(self) -> None:
        """The agent was lost: nothing runs any more."""

    def snapshot(self) -> Any:
        """See ``Stateful``."""

    def restore(self, state: Any, sequences: Sequences) -> None:
        """See ``Stateful``."""


class PromptsFirst(ABC):
    """A prefill step as soon as the request at the head of the queue fits, a decode step over all rows that can
    advance; after ``prefill_streak_limit`` prefill steps that made running rows wait, a decode goes first."""

    def __init__(self, state: SchedulerState, composers: StepComposers) -> None:
        self._state = state
        self._prefills = composers.prefills
        self._decodes = composers.decodes
        self._streak = 0
        self._streak_limit = prefill_streak_limit(state.limits.max_num_seqs, state.limits.prefill_batch_size)

    def next_step(self, now: float) -> ScheduledStep | None:
        if self._streak < self._streak_limit:
            return self._prefill(now) or self._decode(now, StepReason.ROWS_READY)
        step = self._decode(now, StepReason.ROWS_OVERDUE)
        if step is None and not self._state.in_flight.num_steps:
            step = self._prefill(now)
        return step

    def step_answered(self, step: ScheduledStep, result: StepResult) -> None:
        """After a decode step prefills may go ahead again."""
        if step.kind is StepKind.DECODE:
            self._streak = 0

    def reset(self) -> None:
        self._streak = 0

    @abstractmethod
    def _decode_is_due(self) -> bool:
        """Whether it is time to put the next decode step together."""

    def _prefill(self, now: float) -> ScheduledStep | None:
        step = self._prefills.compose(now, StepReason.PROMPT_READY)
        if step is not None:
            self._streak += self._keeps_rows_waiting(step)
        return step

    def _decode(self, now: float, reason: StepReason) -> ScheduledStep | None:
        if not self._state.running or not self._decode_is_due():
            return None
        return self._decodes.compose(now, reason)

    def _keeps_rows_waiting(self, prefill: ScheduledStep) -> bool:
        """Whether others would decode if these were not prefilled."""
        return self._state.in_flight.num_decode_steps > 0 or any(
            sequence.wants_token and sequence.request not in prefill.requests for sequence in self._state.running
        )

    def snapshot(self) -> int:
        return self._streak

    def restore(self, state: int, sequences: Sequences) -> None:
        self._streak = state


def prefill_streak_limit(max_num_seqs: int, prefill_batch_size: int) -> int:
    """Prefill steps that may be scheduled while running requests wait to decode: enough to fill every row once.

    A burst runs as the policy promises, and a stream of one-token requests cannot stop the others for good.
    """
    return -(-max_num_seqs // prefill_batch_size)


class PrefillFirst(PromptsFirst):
    """Decode steps would only lie in the agent's queue behind the prefills, so the next one is put together when no
    more than ``decode_steps_ahead`` steps of any kind are unanswered: by then it holds the rows just prefilled, too.
    """

    def _decode_is_due(self) -> bool:
        return self._state.in_flight.num_compute_steps <= self._state.limits.decode_steps_ahead


class Fcfs(PromptsFirst):
    """A decode step is put together when no more than ``decode_steps_ahead`` decode steps are unanswered."""

    def _decode_is_due(self) -> bool:
        return self._state.in_flight.num_decode_steps <= self._state.limits.decode_steps_ahead


DECODE_STREAK_LIMIT = 32
"""Decode steps that a prompt waits for at most when it could start. The more such prompts wait, the sooner comes a
prefill step: with one waiting after 32 decode steps, with four after 8, with 32 after every one; n of them start within
32 * (1 + 1/2 + ... + 1/n) decode steps, whether the running requests ever end or not. (A fixed 32 between two prefill
steps let 1500 requests at 10 a second take four times the time of any other policy, in a simulation.)"""


class DecodeFirst:
    """Prefill steps only when no running row wants a token, or after so many decode steps in a row.

    A decode that is queued while a prefill is would run before it. So that the limit holds, none is queued beside a
    prefill that was due.
    """

    def __init__(self, state: SchedulerState, composers: StepComposers) -> None:
        self._state = state
        self._prefills = composers.prefills
        self._decodes = composers.decodes
        self._streak = 0
        self._overdue_in_flight = False

    def next_step(self, now: float) -> ScheduledStep | None:
        in_flight = self._state.in_flight
        if self._overdue_in_flight:
            return None
        if self._streak >= self._streak_limit():
            step = self._prefills.compose(now, StepReason.PROMPT_OVERDUE)
            if step is not None:
                self._overdue_in_flight = True
                return step
            self._streak = 0  # nobody waits who could start
        if self._rows_want_tokens():
            step = self._decode(now)
        else:
            step = self._prefills.compose(now, StepReason.PROMPT_READY) or self._decode(now)
        if step is None and not in_flight.num_steps:
            step = self._prefills.compose(now, StepReason.PROMPT_READY)
        return step

    def step_answered(self, step: ScheduledStep, result: StepResult) -> None:
        """A prefill that has run begins the count of decodes again."""
        if step.kind is StepKind.PREFILL:
            self._streak = 0
            if not self._state.in_flight.num_prefill_steps:
                self._overdue_in_flight = False

    def reset(self) -> None:
        self._streak = 0
        self._overdue_in_flight = False

    def _streak_limit(self) -> int:
        num_startable = min(len(self._state.waiting), self._state.running.num_free_rows)
        return max(1, DECODE_STREAK_LIMIT // max(1, num_startable))

    def _rows_want_tokens(self) -> bool:
        return any(sequence.is_decoding and sequence.wants_token for sequence in self._state.running)

    def _decode(self, now: float) -> ScheduledStep | None:
        if not self._state.running or self._state.in_flight.num_decode_steps > self._state.limits.decode_steps_ahead:
            return None
        step = self._decodes.compose(now, StepReason.ROWS_READY)
        if step is not None and (self._state.waiting or self._state.running.prefilling):
            self._streak += 1
        return step

    def snapshot(self) -> list[Any]:
        return [self._streak, self._overdue_in_flight]

    def restore(self, state: list[Any], sequences: Sequences) -> None:
        self._streak, self._overdue_in_flight = state


class Chunked:
    """A step is put together when no more than ``decode_steps_ahead`` are unanswered."""

    def __init__(self, state: SchedulerState, composers: StepComposers) -> None:
        self._state = state
        self._mixed = composers.mixed

    def next_step(self, now: float) -> ScheduledStep | None:
        limits = self._state.limits
        if self._state.in_flight.num_compute_steps > limits.decode_steps_ahead:
            return None
        return self._mixed.compose(limits.mixed_step_tokens, now, StepReason.BUDGET_SHARED)

    def step_answered(self, step: ScheduledStep, result: StepResult) -> None:
        pass

    def reset(self) -> None:
        pass

    def snapshot(self) -> None:
        return None

    def restore(self, state: None, sequences: Sequences) -> None:
        """Has no state."""
