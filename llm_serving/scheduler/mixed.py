"""Composes mixed steps, which have decoding sequences and chunks of prompts, for the policies ``chunked`` and ``slo``.

This is stall-free batching (Sarathi-Serve, Agrawal et al. 2024): no decoding sequence waits for the prefill of a whole
prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from llm_serving.admission.light_keys import MAX_LIGHT_STREAK, LightKeys
from llm_serving.admission.slo_starts import SloStarts
from llm_serving.admission.starter import Starter
from llm_serving.scheduler.composer import StepComposer
from llm_serving.scheduler.output import ScheduledStep, StepKind, StepReason
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.state import SchedulerState
from llm_serving.scheduler.step_builder import ChunkPlan, DecodeBatch, append_chunks, build_decode

_MIN_CHUNK = 16
"""Tokens of a mixed step that prompts get even if decoding sequences use the whole budget. So prompts always make
progress.
"""

_MAX_STEPS_WITHOUT_PROMPTS = 8
"""Maximum number of consecutive steps that decoding sequences may fill while prompts wait. A prefill step follows."""


class MixedComposer(StepComposer):
    """Composes mixed steps, in addition to prefill and decode steps."""

    STATE = (*StepComposer.STATE, "_num_without_prompts", "_light_streak")

    _num_without_prompts = 0
    """Number of steps that decoding sequences filled while prompts waited, since the last prefill step."""

    _light_streak = 0
    """Number of consecutive steps that had only prompts of light keys (tenants with few requests)."""

    def __init__(
        self,
        state: SchedulerState,
        starter: Starter,
        preempt: Callable[[Sequence, float], None],
        light_keys: LightKeys,
        *,
        waits_for_prefill: bool,
    ) -> None:
        super().__init__(state, starter, preempt, waits_for_prefill=waits_for_prefill)
        self.light_keys = light_keys

    def mixed(
        self,
        budget: int,
        now: float,
        reason: StepReason,
        *,
        starts: SloStarts | None = None,
        late: frozenset[Sequence] = frozenset(),
    ) -> ScheduledStep | None:
        """Returns a step with one token of each sequence that can decode, and chunks of prompts.

        Returns None if there is nothing to run. If sequences decode, ``budget`` is the step's maximum number of tokens.
        But prompts get up to ``_MIN_CHUNK`` tokens even if they do not fit. Sequences that wait with drafts also
        decode: they are not in the step, but their next tokens wait for its end. If no sequence decodes, ``budget``
        does not limit the step. ``starts`` decides which requests may start. The prompts in ``late`` can no longer be
        on time. They only get tokens that no other prompt can use.
        """
        if not any(flight.step.overtakes for flight in self._state.in_flight):
            self._light_streak = 0  # otherwise, steps for light keys still run before this step
        if self._num_without_prompts >= _MAX_STEPS_WITHOUT_PROMPTS:
            self._num_without_prompts = 0
            plan = self._mixed_plan([], 0, budget, now, starts, late)
            if plan:
                return self._send_prefill(plan, StepReason.PROMPT_OVERDUE)
        decoding = self._decoding_sequences(now)
        plan = self._mixed_plan(decoding, len(decoding) or self._num_behind_drafts(), budget, now, starts, late)
        if not plan:
            return self._send_decode_or_drafts(decoding, StepReason.ROWS_READY) if decoding else None
        if not decoding:
            return self._send_prefill(plan, StepReason.PROMPT_READY)
        in_flight = self._state.in_flight
        step = _build(in_flight.next_seq, reason, self._columns(decoding), plan)
        sequences = [*decoding, *plan.sequences]
        return in_flight.add(step, sequences, first_chunk=len(decoding), copies=self._note_chunks(plan))

    def light_prefill(self, budget: int, now: float) -> ScheduledStep | None:
        """Returns a prefill step of at most ``budget`` tokens with prompts of light keys only.

        Returns None if no prompt of a light key can start or continue. After ``MAX_LIGHT_STREAK`` of these steps in
        succession, also returns None until ``mixed`` is called. If the agent can do so, it runs the step before queued
        steps. A sequence that is in a step in flight is then left out, because its steps must run in order.
        """
        state, light_keys, overtakes = self._state, self.light_keys, self._state.limits.runs_light_prefills_first
        if self._light_streak >= MAX_LIGHT_STREAK or not light_keys.look(now):
            return None
        others = frozenset(
            sequence
            for sequence in state.running.prefilling
            if not light_keys.is_light(sequence) or (overtakes and sequence.num_inflight_steps)
        )
        plan = ChunkPlan(state.limits, min(budget, state.limits.max_num_batched_tokens))
        self._continue_prompts(plan, skip=others)
        self._starter.fill(plan, now, whole=False, only_light=True)
        if not plan:
            return None
        self._light_streak += 1
        step = self._send_prefill(plan, StepReason.PROMPT_READY)
        step.overtakes = overtakes
        return step

    def _num_behind_drafts(self) -> int:
        """Returns the number of decoding sequences if one of them has a draft, otherwise 0.

        A sequence with a draft waits until its step in flight has ended, even if this step does not verify the draft.
        """
        running = self._state.running
        if not self._state.may_have_drafts or not any(sequence.draft for sequence in running):
            return 0
        return sum(sequence.is_decoding for sequence in running)

    def _mixed_plan(
        self,
        decoding: list[Sequence],
        num_decoding: int,
        budget: int,
        now: float,
        starts: SloStarts | None,
        late: frozenset[Sequence],
    ) -> ChunkPlan:
        """Returns the chunks of a step for ``decoding``. ``budget`` limits them if ``num_decoding`` is not 0."""
        state, limits = self._state, self._state.limits
        num_tokens = limits.max_num_batched_tokens - len(decoding)
        if num_decoding:
            num_tokens = min(num_tokens, max(budget - num_decoding, _MIN_CHUNK))
        history = sum(s.request.num_tokens for s in decoding if s.restarts and s.request.sampling.has_penalties)
        plan = ChunkPlan(limits, num_tokens, history)
        self._continue_prompts(plan, skip=late)
        self._starter.fill(plan, now, whole=False, starts=starts)
        if late:
            self._continue_prompts(plan, skip=frozenset(plan.sequences))
        if num_tokens <= 0 and (state.running.num_prefilling or state.intake):
            self._num_without_prompts += 1
        return plan


def _build(seq: int, reason: StepReason, batch: DecodeBatch, plan: ChunkPlan) -> ScheduledStep:
    """Builds a mixed step: first one token of each decoding sequence, then the prompt chunks of the plan."""
    step = build_decode(seq, reason, batch)
    step.kind = StepKind.MIXED
    # Consecutive decode steps of one batch share these lists. ``append_chunks`` appends to the lists, so the mixed step
    # needs copies.
    step.requests = list(step.requests)
    step.rows = list(step.rows)
    step.query_lens = list(step.query_lens)
    step.block_tables = list(step.block_tables)
    step.do_sample = list(step.do_sample)
    step.restarts = list(step.restarts)
    append_chunks(step, plan)
    return step
