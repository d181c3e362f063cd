"""Steps of prompts alone.

Steps of rows that decode together with chunks of prompts (Sarathi-Serve, Agrawal et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.kvcache.kv_cache_manager import BlockCopy
from llm_serving.scheduler.batching import Starter, StartGate
from llm_serving.scheduler.decode_steps import DecodeComposer
from llm_serving.scheduler.output import ScheduledStep, StepReason
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.state import SchedulerState
from llm_serving.scheduler.step_builder import ChunkPlan, build_mixed, build_prefill

__all__ = ["MAX_PREFILL_STEPS_IN_FLIGHT", "MixedComposer", "PrefillComposer"]

MAX_PREFILL_STEPS_IN_FLIGHT = 2
"""One runs, one is queued: the agent never idles and a decode never waits behind a long queue of prefills."""


class PrefillComposer:
    """Puts prefill steps together: first what did not fit the steps before, then whole prompts."""

    def __init__(self, state: SchedulerState, starter: Starter) -> None:
        self._state = state
        self._starter = starter

    def compose(self, now: float, reason: StepReason) -> ScheduledStep | None:
        """The next prefill step; None when no prompt can start or go on, or enough of these steps are in flight."""
        state = self._state
        if state.in_flight.num_prefill_steps >= MAX_PREFILL_STEPS_IN_FLIGHT:
            return None
        if not state.running.num_prefilling and not state.waiting:
            return None
        plan = ChunkPlan(state.limits, state.limits.max_num_batched_tokens)
        continue_prompts(plan, state)
        self._starter.fill(plan, now, whole=True)
        return self.send(plan, reason) if plan else None

    def send(self, plan: ChunkPlan, reason: StepReason) -> ScheduledStep:
        """The step of a plan."""
        in_flight = self._state.in_flight
        step = build_prefill(in_flight.next_seq, reason, plan.sequences, plan.query_lens)
        return in_flight.add(step, plan.sequences, copies=note_chunks(plan, self._state))


def continue_prompts(plan: ChunkPlan, state: SchedulerState, skip: frozenset[Sequence] = frozenset()) -> None:
    """Add the next chunks of prompts that have begun, in order of arrival."""
    for sequence in state.running.prefilling:
        if sequence in skip:
            continue
        if not plan.takes(sequence, sequence.num_uncomputed_tokens):
            return
        plan.add(sequence)


def note_chunks(plan: ChunkPlan, state: SchedulerState) -> list[BlockCopy]:
    """The chunks are on their way: those whose prompt they end decode from now on. The copies they begin with."""
    copies: list[BlockCopy] = []
    for sequence in plan.sequences:
        sequence.request.receipt.chunks += 1
        copies += sequence.copies
        sequence.copies = []
        if not sequence.num_uncomputed_tokens:
            state.running.end_prefill(sequence)
    return copies


_LEAST_CHUNK = 16
"""Tokens of a step that prompts get whatever the rows leave of the budget: many rows may slow prompts down, not stop
them."""

_MOST_STEPS_WITHOUT_PROMPTS = 8
"""Steps that rows may fill to the last token while prompts wait; then comes one of prompts alone."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """What prompts may have of a step."""

    budget: int
    now: float
    gate: StartGate | None
    late: frozenset[Sequence]


class MixedComposer:
    """Puts steps together of every row that can advance, and of prompts in what room is left."""

    def __init__(
        self, state: SchedulerState, decodes: DecodeComposer, prefills: PrefillComposer, starter: Starter
    ) -> None:
        self._state = state
        self._decodes = decodes
        self._prefills = prefills
        self._starter = starter
        self._num_without_prompts = 0

    def compose(
        self,
        budget: int,
        now: float,
        reason: StepReason,
        *,
        gate: StartGate | None = None,
        late: frozenset[Sequence] = frozenset(),
    ) -> ScheduledStep | None:
        """The next step of about ``budget`` tokens, rows first; None when there is nothing to run.

        ``gate`` is asked about requests that start in it. Prompts that are ``late`` go on when all others have what
        they can use.
        """
        offer = _Offer(budget, now, gate, late)
        if self._num_without_prompts >= _MOST_STEPS_WITHOUT_PROMPTS:
            self._num_without_prompts = 0
            plan = self._prompts(offer, [])
            if plan:
                return self._prefills.send(plan, StepReason.PROMPT_OVERDUE)
        rows = self._decodes.rows(now)
        plan = self._prompts(offer, rows)
        if not plan:
            return self._decodes.send(rows, StepReason.ROWS_READY) if rows else None
        if not rows:
            return self._prefills.send(plan, StepReason.PROMPT_READY)
        in_flight = self._state.in_flight
        step = build_mixed(in_flight.next_seq, reason, self._decodes.batch(rows), plan.sequences, plan.query_lens)
        copies = note_chunks(plan, self._state)
        return in_flight.add(step, [*rows, *plan.sequences], first_chunk=len(rows), copies=copies)

    def _prompts(self, offer: _Offer, rows: list[Sequence]) -> ChunkPlan:
        state, limits = self._state, self._state.limits
        room = limits.max_num_batched_tokens - len(rows)
        if rows:
            room = min(room, max(offer.budget - len(rows), _LEAST_CHUNK))
        plan = ChunkPlan(limits, room, _num_history_tokens(rows))
        continue_prompts(plan, state, skip=offer.late)
        self._starter.fill(plan, offer.now, whole=False, gate=offer.gate)
        if offer.late:
            continue_prompts(plan, state, skip=frozenset(plan.sequences))
        if room <= 0 and (state.running.prefilling or state.waiting):
            self._num_without_prompts += 1
        return plan

    def snapshot(self) -> int:
        """Returns the number of steps without prompts."""
        return self._num_without_prompts

    def restore(self, state: int) -> None:
        """Restores what ``snapshot`` returned."""
        self._num_without_prompts = state


def _num_history_tokens(rows: list[Sequence]) -> int:
    return sum(s.request.num_tokens for s in rows if s.restarts and s.request.sampling.has_penalties)
