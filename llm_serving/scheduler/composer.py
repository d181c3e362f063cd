"""Composes prefill and decode steps: chooses their sequences, and starts or preempts sequences for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from llm_serving.kvcache.block_pool import BlockCopy
from llm_serving.scheduler.output import ScheduledStep, StepReason
from llm_serving.scheduler.sequence import Sequence, SequenceState
from llm_serving.scheduler.snapshot import Stateful
from llm_serving.scheduler.starting import Starter
from llm_serving.scheduler.state import SchedulerState
from llm_serving.scheduler.step_builder import ChunkPlan, DecodeBatch, build_decode, build_prefill

MAX_PREFILL_STEPS_IN_FLIGHT = 2
"""Maximum number of prefill steps in flight. One runs and one is queued.

So the agent is never idle, and a decode step waits for few prefill steps.
"""


class StepComposer(Stateful):
    """Composes the steps that a policy asks for.

    A decode step waits until all decoding sequences can be in it, and a newly prefilled sequence joins the next one.
    Otherwise the batch could split for good into groups that decode alternately.
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
        """With ``waits_for_prefill``, a sequence decodes only after its prefill has completed.

        This is needed if the agent runs queued decode steps before queued prefill steps.
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
        """Returns a prefill step with chunks of unfinished prompts, then whole new prompts.

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
        """Returns the prefill step of a plan that is not empty."""
        in_flight = self._state.in_flight
        step = build_prefill(in_flight.next_seq, reason, plan)
        return in_flight.add(step, plan.sequences, copies=self._note_chunks(plan))

    def prefill_alone(self, sequence: Sequence, reason: StepReason) -> ScheduledStep:
        """Returns a prefill step of one sequence only, which has a batch row and blocks."""
        plan = ChunkPlan(self._state.limits, self._state.limits.max_num_batched_tokens)
        plan.add(sequence)
        return self._send_prefill(plan, reason)

    def _continue_prompts(self, plan: ChunkPlan, skip: frozenset[Sequence] = frozenset()) -> None:
        """Adds the next chunks of unfinished prompts to the plan, in order of arrival, except those in ``skip``."""
        for sequence in self._state.running.prefilling:
            if sequence in skip:
                continue
            if not plan.fits(sequence, sequence.num_uncomputed_tokens):
                return
            plan.add(sequence)

    def _note_chunks(self, plan: ChunkPlan) -> list[BlockCopy]:
        """Updates the sequences whose chunks are in a step. Returns the copies of blocks that the step makes."""
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

        Returns None if there is none, or to wait for more sequences. ``_waits_for_more`` decides about the wait
        (``decode_batch_waiting_time``).
        """
        sequences = self._decoding_sequences(now)
        return self._send_decode(sequences, reason) if sequences else None

    def decode_alone(self, sequence: Sequence, now: float, reason: StepReason) -> ScheduledStep | None:
        """Returns a step of one sequence that decodes. Returns None if it had to be preempted. No step is in flight."""
        sequences = self._grow([sequence], now)
        return self._send_decode(sequences, reason) if sequences else None

    def _send_decode(self, sequences: list[Sequence], reason: StepReason) -> ScheduledStep:
        in_flight = self._state.in_flight
        step = build_decode(in_flight.next_seq, reason, self._columns(sequences))
        return in_flight.add(step, sequences, first_chunk=len(sequences))

    def _columns(self, sequences: list[Sequence]) -> DecodeBatch:
        """Returns the columns (lists, one entry per sequence) of the last decode step if the batch is the same,
        otherwise new ones.
        """
        batch, changes = self._batch, self._state.running.num_changes
        if batch is None or changes != self._batch_changes or batch.sequences != sequences:
            batch = self._batch = DecodeBatch.of(sequences)
            self._batch_changes = changes
        return batch

    def _decoding_sequences(self, now: float) -> list[Sequence]:
        """Returns the sequences of the next decode step in order of arrival. Each has a block for its token.

        Preempts other sequences if blocks are missing.
        """
        state = self._state
        while True:
            ready, num_joining = self._ready()
            if not ready or self._waits_for_more(len(ready), num_joining, now):
                return []
            if len(ready) > state.limits.decode_batch_size:
                ready = self._choose(ready)
            if state.limits.num_host_blocks:
                ready = self._limit_history(ready)
            self._held_since = None
            sequences = self._grow(ready, now)
            if sequences or state.in_flight.num_steps or state.running.num_leaving:
                return sequences
            # All chosen sequences were preempted. Choose other sequences immediately, because without a step in flight
            # the engine would not call this method again.

    def _ready(self) -> tuple[list[Sequence], int]:
        """Returns the sequences that can decode, and the number of sequences that will join after their prefill.

        Returns no sequences if a decoding sequence cannot be in the step yet.
        """
        ready, num_joining = [], 0
        ahead, waits_for_prefill = self._state.limits.decode_steps_ahead, self._waits_for_prefill
        for sequence in self._state.running:
            if not sequence.is_decoding:
                num_joining += 1
                continue
            request = sequence.request
            num_inflight_tokens = request.num_inflight_tokens
            if len(request.output_token_ids) + num_inflight_tokens >= sequence.max_output_tokens:
                continue  # needs no block: the steps in flight sample its last token
            if num_inflight_tokens <= ahead and not (waits_for_prefill and _prefill_in_flight(sequence)):
                ready.append(sequence)
            elif sequence.num_inflight_decodes:
                return [], 0
            else:
                num_joining += 1
        return ready, num_joining

    def _waits_for_more(self, num_ready: int, num_joining: int, now: float) -> bool:
        """Returns True if the batch is not full and may wait for more sequences. Then it also sets the wakeup."""
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
        """Limits a decode step to its maximum number of sequences: returns those that were chosen least recently."""
        chosen = sorted(ready, key=lambda sequence: sequence.last_chosen)[: self._state.limits.decode_batch_size]
        for sequence in chosen:
            self._num_choices += 1
            sequence.last_chosen = self._num_choices
        return sorted(chosen, key=lambda sequence: sequence.arrival_index)

    def _limit_history(self, ready: list[Sequence]) -> list[Sequence]:
        """Removes sequences that come back from the host from a decode step if their token histories exceed its
        capacity.

        A later step takes the removed sequences.
        """
        capacity = self._state.limits.max_step_history
        chosen = []
        for sequence in ready:
            if sequence.restarts and sequence.request.sampling.has_penalties:
                if sequence.request.num_tokens > capacity:
                    continue
                capacity -= sequence.request.num_tokens
            chosen.append(sequence)
        return chosen

    def _grow(self, ready: list[Sequence], now: float) -> list[Sequence]:
        """Gives each sequence the block that its next token needs, the oldest first, and returns those that have it.

        If no block is free, this method preempts the sequence that arrived last. But if steps in flight will free
        blocks, it preempts none and leaves the sequence without a block out of this step.
        """
        running = self._state.running
        in_need = running.in_need_of_block(ready)
        if not in_need:
            return ready
        without_block: list[Sequence] = []
        for sequence in in_need:
            while sequence.state is SequenceState.RUNNING and not running.grow(sequence):
                if running.num_leaving_blocks > len(without_block):
                    without_block.append(sequence)
                    break
                self._preempt(running.victim, now)
        return [s for s in ready if s.state is SequenceState.RUNNING and s not in without_block]


def _prefill_in_flight(sequence: Sequence) -> bool:
    return sequence.num_inflight_steps > sequence.num_inflight_decodes
