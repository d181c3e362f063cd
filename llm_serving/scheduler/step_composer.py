"""Which sequences the next step runs: admission, prefill batches, decode batches, room for their next tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from llm_serving.receipt import Phase
from llm_serving.request import RequestStatus
from llm_serving.scheduler.in_flight import InFlightSteps
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import ScheduledStep, StepKind
from llm_serving.scheduler.policy import MAX_PREFILL_STEPS_IN_FLIGHT, blocks_group, may_decode, prefill_streak_limit
from llm_serving.scheduler.request_queue import RequestQueue
from llm_serving.scheduler.running import RunningSet
from llm_serving.scheduler.sequence import Sequence, SequenceState
from llm_serving.scheduler.step_builder import DecodeBatch, build_decode, build_prefill

__all__ = ["StepComposer"]


class StepComposer:
    """Puts steps together. Starts sequences and has others preempted; ending them is the scheduler's."""

    def __init__(
        self,
        limits: SchedulerLimits,
        waiting: RequestQueue,
        running: RunningSet,
        in_flight: InFlightSteps,
        preempt: Callable[[Sequence, float], None],
    ) -> None:
        self.wakeup: float | None = None
        """When a batch held back by the last ``compose`` has waited long enough."""
        self._limits = limits
        self._waiting = waiting
        self._running = running
        self._in_flight = in_flight
        self._preempt = preempt
        self._next_seq = 0
        self._prefill_streak = 0
        self._prefill_streak_limit = prefill_streak_limit(limits.max_num_seqs, limits.prefill_batch_size)
        self._partial: Sequence | None = None
        self._decode_held_since: float | None = None
        self._turns = count(1)
        self._batch: DecodeBatch | None = None
        self._batch_changes = 0

    def compose(self, now: float) -> ScheduledStep | None:
        """The next step, a prefill if there can be one; a decode goes first when prefills have had their turn."""
        self.wakeup = None
        if self._prefill_streak < self._prefill_streak_limit:
            return self._compose_prefill(now) or self._compose_decode(now)
        step = self._compose_decode(now)
        if step is None and not self._in_flight.num_steps:
            step = self._compose_prefill(now)
        return step

    def step_answered(self, step: ScheduledStep) -> None:
        """A decode step has run: prefills may go ahead again."""
        if step.kind is StepKind.DECODE:
            self._prefill_streak = 0

    def reset(self) -> None:
        """Nothing runs any more."""
        self._prefill_streak = 0
        self._partial = None
        self._decode_held_since = None

    # Prefill

    def _compose_prefill(self, now: float) -> ScheduledStep | None:
        if self._in_flight.num_prefill_steps >= MAX_PREFILL_STEPS_IN_FLIGHT:
            return None
        sequences, query_lens = self._next_chunk()
        if self._may_admit(sequences) and (sequences or not self._held_for_batch(now)):
            self._admit(sequences, query_lens, now)
        if not sequences:
            return None
        self._prefill_streak += self._keeps_waiting(sequences)
        step = build_prefill(self._next_seq, sequences, query_lens)
        return self._send(step, sequences)

    def _keeps_waiting(self, prefilled: list[Sequence]) -> bool:
        """Whether others would decode if these were not prefilled."""
        return self._in_flight.num_decode_steps > 0 or any(
            sequence.wants_token and sequence not in prefilled for sequence in self._running
        )

    def _next_chunk(self) -> tuple[list[Sequence], list[int]]:
        """The next chunk of the sequence, if any, whose known tokens did not fit the step that started it."""
        sequence, self._partial = self._partial, None
        if sequence is None or sequence.state is not SequenceState.RUNNING:
            return [], []
        remaining = sequence.request.num_tokens - sequence.request.num_computed_tokens
        query_len = min(remaining, self._limits.max_num_batched_tokens)
        if query_len < remaining:
            self._partial = sequence
        return [sequence], [query_len]

    def _may_admit(self, chunk: list[Sequence]) -> bool:
        """Nobody is admitted while a preempted sequence, which goes first, still drains; nor beside a chunk with
        penalties, whose history may fill the step."""
        if not self._waiting or self._running.num_preempted_leaving:
            return False
        return not chunk or not chunk[0].request.sampling.has_penalties

    def _held_for_batch(self, now: float) -> bool:
        """Whether the batch is not full and may wait for more requests; sets the time to look again."""
        limits, waiting = self._limits, self._waiting
        full = (
            len(waiting) >= min(limits.prefill_batch_size, self._running.num_free_rows)
            or waiting.num_tokens >= limits.max_num_batched_tokens
        )
        deadline = waiting.peek().request.arrival_time + limits.batch_waiting_time
        if full or deadline <= now:
            return False
        self._wake_at(deadline)
        return True

    def _admit(self, sequences: list[Sequence], query_lens: list[int], now: float) -> None:
        """Start waiting sequences in order while the step and the cache have room."""
        limits, budget = self._limits, self._limits.max_num_batched_tokens - sum(query_lens)
        while self._waiting and len(sequences) < limits.prefill_batch_size:
            sequence = self._waiting.peek()
            request = sequence.request
            num_tokens = request.num_tokens
            if (num_tokens > budget and sequences) or not self._running.fits(num_tokens, limits.watermark_blocks):
                return
            self._waiting.pop()
            self._running.start(sequence)
            request.status = RequestStatus.RUNNING
            if request.first_scheduled_time is None:
                request.first_scheduled_time = now
                request.receipt.enter(Phase.PREFILL, now)
            sequences.append(sequence)
            query_lens.append(min(num_tokens, budget))
            budget -= query_lens[-1]
            if query_lens[-1] < num_tokens:
                self._partial = sequence

    # Decode

    def _compose_decode(self, now: float) -> ScheduledStep | None:
        limits = self._limits
        if not self._running or not may_decode(limits.policy, self._in_flight, limits.decode_steps_ahead):
            return None
        ready, num_joining = self._ready_to_decode()
        if not ready or self._held_for_rows(len(ready), num_joining, now):
            return None
        if len(ready) > limits.decode_batch_size:
            ready = self._take_turns(ready)
        sequences = self._grow(ready, now)
        if sequences:
            return self._send(build_decode(self._next_seq, self._decode_batch(sequences)), sequences)
        if self._in_flight.num_steps:
            return None
        # The rows whose turn it was were preempted themselves; nothing is in flight that would bring us back here.
        return self._compose_decode(now)

    def _decode_batch(self, sequences: list[Sequence]) -> DecodeBatch:
        """The shared columns of ``sequences``: those of the last decode step, if no row has changed hands since."""
        batch, changes = self._batch, self._running.num_changes
        if batch is None or changes != self._batch_changes or batch.sequences != sequences:
            batch = self._batch = DecodeBatch.of(sequences)
            self._batch_changes = changes
        return batch

    def _ready_to_decode(self) -> tuple[list[Sequence], int]:
        """The rows that can advance, in order of arrival, and how many more will join when their prefill is
        answered. No rows when one that is decoding would be left behind."""
        ready, num_joining, ahead = [], 0, self._limits.decode_steps_ahead
        for sequence in self._running:
            if sequence is self._partial:
                num_joining += 1
                continue
            request = sequence.request
            num_inflight_tokens = request.num_inflight_tokens
            if len(request.output_token_ids) + num_inflight_tokens >= sequence.max_output_tokens:
                continue  # a sure ending: no further token is wanted
            if num_inflight_tokens <= ahead:
                ready.append(sequence)
            elif blocks_group(sequence):
                return [], 0
            else:
                num_joining += 1
        return ready, num_joining

    def _held_for_rows(self, num_ready: int, num_joining: int, now: float) -> bool:
        """Whether the batch is not full and may wait for rows on their way; sets the time to look again."""
        limits = self._limits
        on_the_way = num_joining or self.wakeup is not None
        if limits.decode_batch_waiting_time <= 0.0 or not on_the_way or num_ready >= limits.decode_batch_size:
            return False
        if self._decode_held_since is None:
            self._decode_held_since = now
        deadline = self._decode_held_since + limits.decode_batch_waiting_time
        if deadline <= now:
            return False
        self._wake_at(deadline)
        return True

    def _take_turns(self, ready: list[Sequence]) -> list[Sequence]:
        """As many as a decode step takes, those first whose last turn is the longest ago; in order of arrival."""
        chosen = sorted(ready, key=lambda sequence: sequence.last_turn)[: self._limits.decode_batch_size]
        for sequence in chosen:
            sequence.last_turn = next(self._turns)
        return sorted(chosen, key=lambda sequence: sequence.arrival_index)

    def _grow(self, ready: list[Sequence], now: float) -> list[Sequence]:
        """Give each row the block its next token needs, oldest first, preempting from the latest when none is left.

        A row for which blocks will come back with the steps in flight is left out of this step.
        """
        running = self._running
        in_need = running.in_need_of_block(ready)
        if not in_need:
            return ready
        short: list[Sequence] = []
        for sequence in in_need:
            while sequence.state is SequenceState.RUNNING and not running.grow(sequence):
                if running.num_leaving_blocks > len(short):
                    short.append(sequence)
                    break
                self._preempt(running.latest, now)
        return [s for s in ready if s.state is SequenceState.RUNNING and s not in short]

    def _wake_at(self, deadline: float) -> None:
        self.wakeup = deadline if self.wakeup is None else min(self.wakeup, deadline)

    def _send(self, step: ScheduledStep, sequences: list[Sequence]) -> ScheduledStep:
        self._in_flight.add(step, sequences)
        self._next_seq += 1
        if step.kind is StepKind.DECODE:
            self._decode_held_since = None
        return step
