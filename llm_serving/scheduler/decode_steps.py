"""Steps of one token a sequence: which rows can advance, whether to wait for more, room for their next tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llm_serving.scheduler.output import ScheduledStep, StepReason
from llm_serving.scheduler.sequence import Sequence, SequenceState
from llm_serving.scheduler.state import SchedulerState
from llm_serving.scheduler.step_builder import DecodeBatch, build_decode

__all__ = ["DecodeComposer"]


class DecodeComposer:
    """Puts decode steps together, and the rows of mixed ones.

    Rows may not drift apart into groups that take turns for good: a step waits until every row that is decoding can
    be in it. All rows then have the same decode steps behind them, and a newly prefilled row joins the next one.
    """

    def __init__(
        self, state: SchedulerState, preempt: Callable[[Sequence, float], None], *, prefill_answered: bool = False
    ) -> None:
        """``prefill_answered``: a row joins when its prefill is answered, the agent running decodes before it."""
        self._state = state
        self._preempt = preempt
        self._prefill_answered = prefill_answered
        self._held_since: float | None = None
        self._num_turns = 0
        self._batch: DecodeBatch | None = None
        self._batch_changes = 0

    def reset(self) -> None:
        """Nothing runs any more."""
        self._held_since = None

    def compose(self, now: float, reason: StepReason) -> ScheduledStep | None:
        """A decode step of every row that can advance; None when there is none, or it is worth waiting for more."""
        sequences = self.rows(now)
        return self.send(sequences, reason) if sequences else None

    def send(self, sequences: list[Sequence], reason: StepReason) -> ScheduledStep:
        """The decode step of these rows."""
        in_flight = self._state.in_flight
        step = build_decode(in_flight.next_seq, reason, self.batch(sequences))
        return in_flight.add(step, sequences, first_chunk=len(sequences))

    def batch(self, sequences: list[Sequence]) -> DecodeBatch:
        """The shared columns of ``sequences``: those of the last step, if no row has changed hands since."""
        batch, changes = self._batch, self._state.running.num_changes
        if batch is None or changes != self._batch_changes or batch.sequences != sequences:
            batch = self._batch = DecodeBatch.of(sequences)
            self._batch_changes = changes
        return batch

    def rows(self, now: float) -> list[Sequence]:
        """The rows of the next step, each with room for its token, in order of arrival. Preempts to make room."""
        state = self._state
        while True:
            ready, num_joining = self._ready()
            if not ready or self._held_for_rows(len(ready), num_joining, now):
                return []
            if len(ready) > state.limits.decode_batch_size:
                ready = self._take_turns(ready)
            if state.limits.num_host_blocks:
                ready = self._whose_history_fits(ready)
            self._held_since = None
            sequences = self._grow(ready, now)
            if sequences or state.in_flight.num_steps or state.running.num_leaving:
                return sequences
            # The rows whose turn it was were preempted themselves; nothing is in flight that would bring us back.

    def _ready(self) -> tuple[list[Sequence], int]:
        """The rows that can advance, in order of arrival, and how many more will join when their prefill is
        answered. No rows when one that is decoding would be left behind."""
        ready, num_joining = [], 0
        ahead, wait_for_prefill = self._state.limits.decode_steps_ahead, self._prefill_answered
        for sequence in self._state.running:
            if not sequence.is_decoding:
                num_joining += 1
                continue
            request = sequence.request
            num_inflight_tokens = request.num_inflight_tokens
            if len(request.output_token_ids) + num_inflight_tokens >= sequence.max_output_tokens:
                continue  # a sure ending: no further token is wanted
            if num_inflight_tokens <= ahead and not (wait_for_prefill and _prefill_in_flight(sequence)):
                ready.append(sequence)
            elif sequence.num_inflight_decodes:
                return [], 0
            else:
                num_joining += 1
        return ready, num_joining

    def _held_for_rows(self, num_ready: int, num_joining: int, now: float) -> bool:
        """Whether the batch is not full and may wait for rows on their way; sets the time to look again."""
        limits = self._state.limits
        on_the_way = num_joining or self._state.wakeup is not None
        if limits.decode_batch_waiting_time <= 0.0 or not on_the_way or num_ready >= limits.decode_batch_size:
            return False
        if self._held_since is None:
            self._held_since = now
        deadline = self._held_since + limits.decode_batch_waiting_time
        if deadline <= now:
            return False
        self._state.wake_at(deadline)
        return True

    def _take_turns(self, ready: list[Sequence]) -> list[Sequence]:
        """As many as a decode step takes, those first whose last turn is the longest ago; in order of arrival."""
        chosen = sorted(ready, key=lambda sequence: sequence.last_turn)[: self._state.limits.decode_batch_size]
        for sequence in chosen:
            self._num_turns += 1
            sequence.last_turn = self._num_turns
        return sorted(chosen, key=lambda sequence: sequence.arrival_index)

    def _whose_history_fits(self, ready: list[Sequence]) -> list[Sequence]:
        """All but those back from the host whose histories are more than a step can carry; they are in a later one."""
        room = self._state.limits.max_step_history
        chosen = []
        for sequence in ready:
            if sequence.restarts and sequence.request.sampling.has_penalties:
                if sequence.request.num_tokens > room:
                    continue
                room -= sequence.request.num_tokens
            chosen.append(sequence)
        return chosen

    def _grow(self, ready: list[Sequence], now: float) -> list[Sequence]:
        """Give each row the block its next token needs, oldest first, preempting from the latest when none is left.

        A row for which blocks will come back with the steps in flight is left out of this step.
        """
        running = self._state.running
        in_need = running.in_need_of_block(ready)
        if not in_need:
            return ready
        short: list[Sequence] = []
        for sequence in in_need:
            while sequence.state is SequenceState.RUNNING and not running.grow(sequence):
                if running.num_leaving_blocks > len(short):
                    short.append(sequence)
                    break
                self._preempt(running.victim, now)
        return [s for s in ready if s.state is SequenceState.RUNNING and s not in short]

    def snapshot(self) -> list[Any]:
        """Returns the state. The columns of the batch are not part of it: the next step makes them again."""
        return [self._held_since, self._num_turns]

    def restore(self, state: list[Any]) -> None:
        """Restores what ``snapshot`` returned."""
        self._held_since, self._num_turns = state


def _prefill_in_flight(sequence: Sequence) -> bool:
    return sequence.num_inflight_steps > sequence.num_inflight_decodes
