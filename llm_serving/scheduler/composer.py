"""Composes prefill and decode steps: chooses the sequences of a step, and starts or preempts sequences for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from llm_serving.admission.starter import Starter
from llm_serving.kvcache.block_pool import BlockCopy
from llm_serving.scheduler.drafts import verify_drafts
from llm_serving.scheduler.output import ScheduledStep, StepReason
from llm_serving.scheduler.returning import limit_history
from llm_serving.scheduler.sequence import Sequence, SequenceState
from llm_serving.scheduler.snapshot import Stateful
from llm_serving.scheduler.state import SchedulerState
from llm_serving.scheduler.step_builder import ChunkPlan, DecodeBatch, build_decode, build_prefill

MAX_PREFILL_STEPS_IN_FLIGHT = 2
"""Maximum number of prefill steps in flight: one runs, and one is queued at the agent.

So the agent is never idle, and a decode step waits for few prefill steps.
"""


class StepComposer(Stateful):
    """Composes the steps that a policy asks for.

    A decode step is composed only when every decoding sequence is ready for it. Otherwise the batch could split into
    groups that decode alternately for a long time. After its prefill, a sequence joins the next decode step.
    """

    STATE: ClassVar[tuple[str, ...]] = ("_held_since", "_num_choices")

    def __init__(
        self,
        state: SchedulerState,
        starter: Starter,
        preempt: Callable[[Sequence, float], None],
        *,
        waits_for_prefill: bool = False,
    ) -> None:
        """Creates the composer. ``preempt`` preempts a sequence.

        With ``waits_for_prefill``, a sequence decodes only after its prefill has completed. This is needed if the agent
        runs queued decode steps before queued prefill steps.
        """
        self._state = state
        self._starter = starter
        self._preempt = preempt
        self._waits_for_prefill = waits_for_prefill
        self._held_since: float | None = None
        self._num_choices = 0
        self._batch: DecodeBatch | None = None
        self._batch_changes = 0

    def prefill(self, now: float, reason: StepReason) -> ScheduledStep | None:
        """Returns a prefill step. It has the next chunks of unfinished prompts, then new prompts that fit the step
        completely.

        Returns None if no prompt can start or continue, or if enough prefill steps are in flight.
        """
        state = self._state
        if state.in_flight.num_prefill_steps >= MAX_PREFILL_STEPS_IN_FLIGHT:
            return None
        if not state.running.num_prefilling and not state.intake:
            return None
        plan = ChunkPlan(state.limits, state.limits.max_num_batched_tokens)
        self._continue_prompts(plan)
        self._starter.fill(plan, now, whole=True)
        return self._send_prefill(plan, reason) if plan else None

    def _send_prefill(self, plan: ChunkPlan, reason: StepReason) -> ScheduledStep:
        """Returns the prefill step for the chunks of ``plan``, which must not be empty."""
        in_flight = self._state.in_flight
        step = build_prefill(in_flight.next_seq, reason, plan)
        return in_flight.add(step, plan.sequences, copies=self._note_chunks(plan))

    def prefill_alone(self, sequence: Sequence, reason: StepReason) -> ScheduledStep:
        """Returns a prefill step with only this sequence, which must have a batch row and blocks."""
        plan = ChunkPlan(self._state.limits, self._state.limits.max_num_batched_tokens)
        plan.add(sequence)
        return self._send_prefill(plan, reason)

    def _continue_prompts(self, plan: ChunkPlan, skip: frozenset[Sequence] = frozenset()) -> None:
        """Adds the next chunks of unfinished prompts, except those of ``skip``, to a plan in order of arrival."""
        for sequence in self._state.running.prefilling:
            if sequence in skip:
                continue
            if not plan.fits(sequence, sequence.num_uncomputed_tokens):
                return
            plan.add(sequence)

    def _note_chunks(self, plan: ChunkPlan) -> list[BlockCopy]:
        """Updates the sequences of a plan whose step is sent. Returns the copies of blocks that the step makes."""
        copies: list[BlockCopy] = []
        for sequence in plan.sequences:
            sequence.request.receipt.chunks += 1
            copies += sequence.copies
            sequence.copies = []
            if not sequence.num_uncomputed_tokens:
                self._state.running.end_prefill(sequence)
        return copies

    def decode(self, now: float, reason: StepReason) -> ScheduledStep | None:
        """Returns a step of all sequences that can decode.

        Returns None if no sequence can decode, or if the step should wait for more sequences
        (``decode_batch_waiting_time``).
        """
        sequences = self._decoding_sequences(now)
        return self._send_decode_or_drafts(sequences, reason) if sequences else None

    def send_decode(self, sequences: list[Sequence], reason: StepReason) -> ScheduledStep:
        """Returns the decode step of these sequences, which must have a block for their next token."""
        in_flight = self._state.in_flight
        step = build_decode(in_flight.next_seq, reason, self._columns(sequences))
        return in_flight.add(step, sequences, first_chunk=len(sequences))

    def _send_decode_or_drafts(self, sequences: list[Sequence], reason: StepReason) -> ScheduledStep:
        """Returns the decode step of these sequences. It verifies the drafts that fit the step and the blocks."""
        step = verify_drafts(self._state, sequences, reason) if self._state.may_have_drafts else None
        return step or self.send_decode(sequences, reason)

    def _columns(self, sequences: list[Sequence]) -> DecodeBatch:
        """Returns the columns of a decode step. If the last decode step had the same batch, reuses its columns."""
        batch, changes = self._batch, self._state.running.num_changes
        if batch is None or changes != self._batch_changes or batch.sequences != sequences:
            batch = self._batch = DecodeBatch.of(sequences)
            self._batch_changes = changes
        return batch

    def _decoding_sequences(self, now: float) -> list[Sequence]:
        """Returns the sequences of the next decode step in order of arrival, and gives each a block for its next token
        if it needs one.

        If too few blocks are free, preempts other sequences.
        """
        state = self._state
        while True:
            ready, num_joining = self._ready()
            if not ready or self._waits_for_more(len(ready), num_joining, now):
                return []
            if len(ready) > state.limits.decode_batch_size:
                ready = self._choose(ready)
            if state.limits.num_host_blocks or state.limits.hands_over:
                ready = limit_history(ready, state.limits.max_step_history)
            self._held_since = None
            sequences = self.grow(ready, now)
            if sequences or state.in_flight.num_steps or state.running.num_leaving:
                return sequences
            # All chosen sequences were preempted. No step is in flight, so no event follows: choose others now.

    def _ready(self) -> tuple[list[Sequence], int]:
        """Returns the sequences that can decode, and the number of sequences that will be able to decode after their
        prefill.

        Returns no sequences if a decoding sequence must wait, because the maximum number of its steps is in flight.
        """
        ready, num_joining, ahead = [], 0, self._state.limits.decode_steps_ahead
        may_wait = self._waits_for_prefill or self._state.may_have_drafts
        for sequence in self._state.running:
            if not sequence.is_decoding:
                num_joining += 1
                continue
            request = sequence.request
            num_inflight_tokens = request.num_inflight_tokens
            if len(request.output_token_ids) + num_inflight_tokens >= sequence.max_output_tokens:
                continue  # the steps in flight sample its last token, so it needs no decode step
            if num_inflight_tokens <= ahead and not (may_wait and self._must_wait(sequence)):
                ready.append(sequence)
            elif sequence.num_inflight_decodes or sequence.draft:
                return [], 0
            else:
                num_joining += 1
        return ready, num_joining

    def _must_wait(self, sequence: Sequence) -> bool:
        """Returns True if a sequence must wait for its prefill or, if it has a draft, for its step in flight."""
        is_in_prefill = self._waits_for_prefill and sequence.num_inflight_steps > sequence.num_inflight_decodes
        return is_in_prefill or bool(sequence.draft and sequence.request.num_inflight_tokens)

    def _waits_for_more(self, num_ready: int, num_joining: int, now: float) -> bool:
        """Returns True, and sets a wakeup, if the decode step is not full and should wait for more sequences."""
        limits = self._state.limits
        expected = num_joining or self._state.wakeup is not None
        if limits.decode_batch_waiting_time <= 0.0 or not expected or num_ready >= limits.decode_batch_size:
            return False
        if self._held_since is None:
            self._held_since = now
        deadline = self._held_since + limits.decode_batch_waiting_time
        if deadline <= now:
            return False
        self._state.wake_at(deadline)
        return True

    def _choose(self, ready: list[Sequence]) -> list[Sequence]:
        """Returns the ``decode_batch_size`` sequences of ``ready`` that were chosen least recently."""
        chosen = sorted(ready, key=lambda sequence: sequence.last_chosen)[: self._state.limits.decode_batch_size]
        for sequence in chosen:
            self._num_choices += 1
            sequence.last_chosen = self._num_choices
        return sorted(chosen, key=lambda sequence: sequence.arrival_index)

    def grow(self, ready: list[Sequence], now: float) -> list[Sequence]:
        """Gives each sequence a block for its next token if it needs one, the oldest sequence first. Returns the
        sequences that have a block.

        If no block is free but steps in flight will free enough blocks, leaves the sequence out of this step. Otherwise
        preempts running sequences (``RunningSet.victim``) until a block is free.
        """
        running = self._state.running
        if not (in_need := running.in_need_of_block(ready)):
            return ready
        without_block: list[Sequence] = []
        for sequence in in_need:
            while sequence.state is SequenceState.RUNNING and not running.grow(sequence):
                if running.num_leaving_blocks > len(without_block):
                    without_block.append(sequence)
                    break
                self._preempt(running.victim, now)
        return [s for s in ready if s.state is SequenceState.RUNNING and s not in without_block]
