"""A request's way through the scheduler: taken in, preempted, started again, ended; and who gets back what it held.

What a step's answer means: tokens for its sequences, ends, and prefixes that are computed now.
"""

from __future__ import annotations

from collections.abc import Iterable

from llm_serving.errors import RequestError
from llm_serving.request import FinishReason, Request, RequestStatus
from llm_serving.scheduler.admission import Admission
from llm_serving.scheduler.block_supply import BlockSupply
from llm_serving.scheduler.intake import RequestQueue
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepKind, StepResult
from llm_serving.scheduler.preemption import PreemptionChoice, Swapper
from llm_serving.scheduler.sequence import Sequence, SequenceState
from llm_serving.scheduler.state import InFlightStep, SchedulerState
from llm_serving.telemetry.receipt import Phase

__all__ = ["AnswerReader", "Lifecycle", "note_end", "note_expiry", "shape_error"]

_ENDED_BY_ITSELF = (FinishReason.STOP, FinishReason.LENGTH)


class Lifecycle:
    """Every change of a sequence's state is made here, but for its start (``Starter``) and its way back from the
    host (``Swapper``)."""

    def __init__(
        self, state: SchedulerState, swapper: Swapper, preemption: PreemptionChoice, admission: Admission
    ) -> None:
        self.sequences: dict[str, Sequence] = {}
        """Every request that has not ended, by its id."""
        self.num_preemptions = 0
        self.num_swaps = 0
        self._state = state
        self._swapper = swapper
        self._preemption = preemption
        self._admission = admission

    def add(self, request: Request) -> None:
        """Take a request in, or raise RequestError, with nothing changed."""
        if request.request_id in self.sequences:
            raise RequestError(f"a request with the id {request.request_id!r} is being served", param="request_id")
        state = self._state
        max_output_tokens = state.limits.max_output_tokens(request)
        state.waiting.check_room(request.num_tokens, state.running.num_free_rows)
        sequence = Sequence(request, state.num_arrivals, max_output_tokens)
        state.num_arrivals += 1
        self.sequences[request.request_id] = sequence
        if not state.waiting:
            state.line.moved(request.arrival_time)
        request.receipt.join(state.line)
        state.waiting.append(sequence)

    def place(self, request: Request, arrival_index: int, now: float) -> None:
        """Take in a request that a router sends here, which looked after the queue's bounds; it may have run before,
        elsewhere. Raises RequestError when it can never be served, with nothing changed."""
        state = self._state
        sequence = Sequence(request, arrival_index, state.limits.max_output_tokens(request))
        state.num_arrivals = max(state.num_arrivals, arrival_index + 1)
        self.sequences[request.request_id] = sequence
        if request.first_scheduled_time is not None:
            state.num_started += 1
            state.waiting.put_back(sequence)
            return
        if not state.waiting:
            state.line.moved(now)
        request.receipt.join(state.line, now)
        state.waiting.append(sequence)

    def release(self, request_id: str) -> None:
        """A waiting request goes elsewhere: it is as if it had never been here."""
        sequence = self.sequences[request_id]
        if sequence.state is not SequenceState.WAITING:
            raise AssertionError(f"{request_id} is {sequence.state.name}: only who waits can go elsewhere")
        del self.sequences[request_id]
        self._state.num_started -= sequence.request.first_scheduled_time is not None
        self._leave_queue(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """A request has ended. What it holds is free at once, or when steps in flight that touch it are answered."""
        state, request = self._state, sequence.request
        note_end(request, reason, now)
        del self.sequences[request.request_id]
        state.num_started -= request.first_scheduled_time is not None
        if reason in _ENDED_BY_ITSELF:
            self._admission.finished(sequence)
        if sequence.state is SequenceState.RUNNING:
            state.running.stop(sequence)
        elif sequence.state is SequenceState.LEAVING:
            state.running.finish_leaving()
        else:
            self._leave_queue(sequence)
            state.held_up = None  # it may have been the one there was no room for
        self.settle(sequence)

    def _leave_queue(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.SWAPPED:
            self._state.swapped.remove(sequence)
            self._swapper.drop(sequence)
        elif sequence.state is SequenceState.WAITING:
            self._state.waiting.remove(sequence)
        sequence.state = SequenceState.GONE

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Take the blocks of a running sequence away: now, or when its steps in flight are answered and, if it is
        swapped, its blocks are on the host."""
        self.num_preemptions += 1
        sequence.request.num_preemptions += 1
        swaps = sequence.on_host or (
            self._preemption.prefers_swap(sequence) and self._swapper.reserve_host(sequence)
        )  # one that was on its way back is still on the host
        self.num_swaps += swaps
        sequence.request.receipt.enter(Phase.SWAPPED if swaps else Phase.PREEMPTED, now)
        self._admission.preempted()
        self._state.running.stop(sequence)
        self.settle(sequence)

    def start_again(self, sequences: Iterable[Sequence], now: float) -> None:
        """A step of these sequences never ran: what later steps say of them is void, and they start again."""
        for sequence in sequences:
            sequence.drop_tokens = True
            if sequence.state is SequenceState.RUNNING:
                sequence.request.receipt.enter(Phase.RESTARTED, now)
                self._state.running.stop(sequence)

    def lose_device(self, now: float) -> None:
        """No step is in flight any more, and nothing that was computed is left: all wait, with their known tokens."""
        running = self._state.running
        self.start_again(list(running), now)
        for sequence in running.leaving:
            sequence.num_inflight_steps = 0
            sequence.drop_tokens = True
            self.settle(sequence)
        swapped, self._state.swapped = self._state.swapped, []
        for sequence in swapped:
            sequence.request.receipt.enter(Phase.RESTARTED, now)
            self._swapper.drop(sequence)
            self._wait_again(sequence)

    def settle(self, sequence: Sequence) -> None:
        """A leaving sequence that no step in flight touches is gone, waits again, is swapped, or is now sent out."""
        if sequence.state is not SequenceState.LEAVING or sequence.num_inflight_steps:
            return
        finished = sequence.request.is_finished
        swaps = bool(sequence.host_table) and not finished and not sequence.drop_tokens
        if swaps and not sequence.on_host:
            self._swapper.send_out(sequence)
            return
        if not swaps:
            self._swapper.drop(sequence)
        self._state.running.release(sequence)
        if finished:
            sequence.state = SequenceState.GONE
        elif swaps:
            sequence.request.status = RequestStatus.SWAPPED
            sequence.state = SequenceState.SWAPPED
            self._state.swap(sequence)
        else:
            self._wait_again(sequence)

    def _wait_again(self, sequence: Sequence) -> None:
        sequence.request.num_computed_tokens = 0
        sequence.request.status = RequestStatus.WAITING
        sequence.state = SequenceState.WAITING
        self._state.waiting.put_back(sequence)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every row and block is held once or free, and counts agree with the steps in
        flight."""
        state = self._state
        state.running.check_integrity(state.swapped)
        holders = [*state.running, *state.running.leaving]
        steps = dict.fromkeys(holders, 0)
        for flight in state.in_flight:
            for sequence in flight.sequences:
                steps[sequence] = steps.get(sequence, 0) + 1
        if steps != {sequence: sequence.num_inflight_steps for sequence in holders}:
            raise AssertionError("a step in flight touches a sequence without blocks, or is counted wrongly")
        unfinished = sum(not sequence.request.is_finished for sequence in holders)
        if unfinished + len(state.waiting) + len(state.swapped) != len(self.sequences):
            raise AssertionError(
                f"{len(self.sequences)} requests: {unfinished} hold blocks, {len(state.waiting)} wait,"
                f" {len(state.swapped)} are swapped"
            )
        if state.num_started != sum(s.request.first_scheduled_time is not None for s in self.sequences.values()):
            raise AssertionError(f"{state.num_started} requests counted as started")


def note_end(request: Request, reason: FinishReason, now: float) -> None:
    """A request has ended."""
    request.status = RequestStatus.FINISHED
    request.finish_reason = reason
    request.finish_time = now
    request.receipt.enter(Phase.DONE, now)


def note_expiry(request: Request, now: float) -> RequestUpdate:
    """The last update of a request that has waited past its deadline."""
    waited = now - request.arrival_time
    error = f"the request's deadline passed before its first token: it waited for {waited:.3f} s"
    return RequestUpdate(request, error=error)


class AnswerReader:
    """Gives sequences their tokens, and ends those whose last it was."""

    def __init__(self, lifecycle: Lifecycle, waiting: RequestQueue, supply: BlockSupply, *, fairness: bool) -> None:
        self._lifecycle = lifecycle
        self._waiting = waiting
        self._supply = supply
        self._fairness = fairness

    def take(self, flight: InFlightStep, result: StepResult, now: float) -> list[RequestUpdate]:
        """The updates of a step that has run."""
        self._note_prefixes(flight)
        updates = []
        finished = RequestStatus.FINISHED
        for index, (sequence, token_id) in enumerate(zip(flight.sequences, result.sampled_ids, strict=True)):
            request = sequence.request
            if token_id < 0 or request.status is finished or sequence.drop_tokens:
                continue
            if sequence.notes_tokens:
                self._note_token(sequence, now)
            output_token_ids = request.output_token_ids
            output_token_ids.append(token_id)
            update = RequestUpdate(request, token_id, index)
            updates.append(update)
            if token_id in sequence.ending_token_ids:
                if token_id not in request.end_token_ids or request.sampling.ignore_eos:
                    update.stop_token_id = token_id
                self._lifecycle.finish(sequence, FinishReason.STOP, now)
            elif len(output_token_ids) >= sequence.max_output_tokens:
                self._lifecycle.finish(sequence, FinishReason.LENGTH, now)
        return updates

    def _note_prefixes(self, flight: InFlightStep) -> None:
        """What the step's chunks computed can be found by others now."""
        step = flight.step
        for index in range(flight.first_chunk, len(flight.sequences)):
            sequence = flight.sequences[index]
            if not sequence.drop_tokens:
                self._supply.answered(sequence, step.starts[index] + step.query_lens[index])

    def _note_token(self, sequence: Sequence, now: float) -> None:
        """The first token, the first since a preemption, or any token where tenants pay: where there is but one, that
        of requests without a key, counting would change nothing."""
        request = sequence.request
        if request.first_token_time is None:
            request.first_token_time = now
        if sequence.state is SequenceState.RUNNING and request.receipt.phase is not Phase.DECODE:
            request.receipt.enter(Phase.DECODE, now)
        pays = self._fairness and self._waiting.has_tenants
        if pays:
            self._waiting.charge_output(sequence)
        sequence.notes_tokens = pays or request.receipt.phase is not Phase.DECODE


def shape_error(step: ScheduledStep, result: StepResult) -> str | None:
    """What is wrong with a successful answer, or None."""
    if result.aborted:
        return None
    sizes = {len(result.sampled_ids), len(result.logits), len(result.logsumexps)}
    if sizes != {step.num_seqs}:
        return f"step {step.seq} has {step.num_seqs} sequences, its answer has columns of {sorted(sizes)}"
    if step.kind is StepKind.DECODE:
        wrong = min(result.sampled_ids) < 0
    else:
        wrong = any((token < 0) is samples for token, samples in zip(result.sampled_ids, step.do_sample, strict=True))
    return f"step {step.seq} sampled where it should not, or did not where it should" if wrong else None
