"""Steps of rows that decode together with chunks of prompts (Sarathi-Serve, Agrawal et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.scheduler.chunk_plan import ChunkPlan
from llm_serving.scheduler.decode_steps import DecodeComposer
from llm_serving.scheduler.output import ScheduledStep, StepReason
from llm_serving.scheduler.prefill_steps import PrefillComposer, continue_prompts, note_chunks
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.starting import Starter, StartGate
from llm_serving.scheduler.state import SchedulerState
from llm_serving.scheduler.step_builder import build_mixed

__all__ = ["MixedComposer"]

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


def _num_history_tokens(rows: list[Sequence]) -> int:
    return sum(s.request.num_tokens for s in rows if s.restarts and s.request.sampling.has_penalties)
