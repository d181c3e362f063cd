"""The lifecycle of a request after its admission: results of its steps, restarts after failures, and its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from llm_serving.admission.starter import Admission
from llm_serving.block_supply.base import BlockSupply
from llm_serving.ipc.drafts import REJECTED
from llm_serving.ipc.shm import NOT_FINITE
from llm_serving.request import FinishReason, Request, RequestStatus
from llm_serving.scheduler.drafts import end_drafts
from llm_serving.scheduler.output import NOT_FINITE_ERROR, RequestUpdate, ScheduledStep, StepKind, StepResult
from llm_serving.scheduler.preemption import Preemption
from llm_serving.scheduler.sequence import HandOverState, InFlightStep, Sequence, SequenceState
from llm_serving.scheduler.state import InFlightSteps, SchedulerState
from llm_serving.telemetry.receipt import Phase
from llm_serving.waiting.context_length import max_output_tokens

if TYPE_CHECKING:
    from llm_serving.block_moves.hand_overs import HandOvers

_ENDED_NORMALLY = (FinishReason.STOP, FinishReason.LENGTH)


class Lifecycle:
    """Changes the state of sequences.

    This class adds, restarts and ends sequences, and appends their tokens. ``Starter`` starts sequences, and
    ``Preemption`` preempts them.
    """

    def __init__(
        self,
        state: SchedulerState,
        supply: BlockSupply,
        preemption: Preemption,
        admission: Admission,
        hand_overs: HandOvers | None = None,
    ) -> None:
        self._state = state
        self._supply = supply
        self._preemption = preemption
        self._admission = admission
        self._hand_overs = hand_overs

    def place(
        self, request: Request, arrival_index: int, now: float, *, hands_over: bool = False, handed: list[int] | None
    ) -> None:
        """Adds a request that a router sends to this scheduler. The request may have run on another replica.

        The router has checked the admission limits. With ``hands_over``, the request leaves for a decode replica after
        its prompt. ``handed`` lists the blocks of the hand-over pool with the keys and values of its known tokens, or
        is None. Raises RequestError, and changes nothing, if the request can never be served.
        """
        state, intake = self._state, self._state.intake
        sequence = Sequence(request, arrival_index, max_output_tokens(request, state.limits))
        intake.num_arrivals = max(intake.num_arrivals, arrival_index + 1)
        intake.sequences[request.request_id] = sequence
        if handed is not None:
            assert self._hand_overs is not None, "only replicas that hand over get handed blocks"
            self._hand_overs.arrive(sequence, handed)
            return
        if hands_over:
            sequence.hand_over = HandOverState.WANTED
        if request.first_scheduled_time is None:
            intake.enqueue(sequence, now)
        else:
            state.num_started += 1
            intake.put_back(sequence)

    def release(self, request_id: str) -> None:
        """Removes a waiting request from this scheduler, because the router sends it to another replica."""
        state, sequence = self._state, self._state.intake.sequences[request_id]
        if sequence.state is not SequenceState.WAITING:
            raise AssertionError(f"{request_id} is {sequence.state.name}; only a waiting request can leave")
        del state.intake.sequences[request_id]
        state.intake.remove(sequence)
        sequence.state = SequenceState.REMOVED
        state.num_started -= sequence.request.first_scheduled_time is not None

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """Ends a request. Its blocks become free when no step in flight uses them."""
        state = self._state
        state.intake.end(sequence, reason, now)
        if reason in _ENDED_NORMALLY:
            self._admission.finished(sequence)
        if sequence.state is SequenceState.WAITING or sequence.state is SequenceState.SWAPPED:
            if sequence.state is SequenceState.WAITING:
                state.intake.remove(sequence)
            else:
                self._preemption.end_swapped(sequence)
            state.note_ended(sequence)
            return
        state.num_started -= 1
        if sequence.state is SequenceState.RUNNING:
            state.running.stop(sequence)
        self._preemption.settle(sequence)

    def restart(self, sequences: Iterable[Sequence], now: float) -> None:
        """Makes sequences compute their prompt and output again, because the agent dropped one of their steps.

        Tokens from their steps that are still in flight are dropped.
        """
        for sequence in sequences:
            sequence.drop_tokens = True
            if sequence.state is SequenceState.RUNNING:
                sequence.request.receipt.enter(Phase.RESTARTED, now)
                self._state.running.stop(sequence)

    def lose_device(self, now: float) -> None:
        """Makes all requests compute their prompts again, because the agent was lost, and with it all KV blocks.

        The caller has already ended all steps in flight.
        """
        for sequence in self._state.running.holders:
            sequence.num_inflight_steps = 0
        self._compute_again(lambda sequence: True, now)

    def distrust(self, now: float, *, recompute: bool) -> None:
        """Makes sequences compute all their tokens again if steps now copy blocks of another replica to the device for
        them.

        With ``recompute``, the same holds for all sequences whose blocks may come from other replicas.
        """
        self._compute_again(_has_foreign_blocks if recompute else _is_arriving, now)

    def _compute_again(self, is_doubtful: Callable[[Sequence], bool], now: float) -> None:
        """Gives up the blocks of the sequences for which ``is_doubtful`` returns True. Their tokens stay, and are
        computed again.
        """
        state = self._state
        held = [each for each in (*state.running.leaving, *state.running) if is_doubtful(each)]
        self.restart(held, now)
        for sequence in held:
            self._preemption.settle(sequence)
        self._preemption.lose_swapped([each for each in state.swapped if is_doubtful(each)], now)

    def end_all(self, sequences: Iterable[Sequence], error: str, now: float) -> list[RequestUpdate]:
        """Ends the requests of these sequences with an error. Requests that have already ended stay unchanged."""
        updates = []
        for sequence in sequences:
            if not sequence.request.is_finished:
                self.finish(sequence, FinishReason.ERROR, now)
                updates.append(RequestUpdate(sequence.request, error=error))
        return updates

    # The following methods take the results of steps.

    def take_result(self, flight: InFlightStep, result: StepResult, now: float) -> list[RequestUpdate]:
        """Processes the result of a step. Returns an update for each new token and for each request that ended."""
        error = result.error or _shape_error(flight.step, result)
        if self._state.may_have_drafts:
            end_drafts(flight.sequences)
        if error is not None:
            for sequence in flight.sequences:
                sequence.drop_tokens = True
            updates = self.end_all(flight.sequences, error, now)
        elif result.aborted:
            updates = []
            self.restart(flight.sequences, now)
        elif flight.step.kind is StepKind.MOVE:
            updates = []
            self._preemption.moved(flight, result, now)
        else:
            updates = self._take_tokens(flight, result, now)
        if self._hand_overs is not None:
            self._hand_overs.take_computed(flight.sequences)
        if self._state.running.num_leaving:
            for sequence in flight.sequences:
                self._preemption.settle(sequence)
        return updates

    def _take_tokens(self, flight: InFlightStep, result: StepResult, now: float) -> list[RequestUpdate]:
        """Appends the tokens of a completed step to its sequences, and ends the sequences that are complete."""
        self._note_prefixes(flight)
        if flight.step.num_drafts:
            for sequence, token_id in zip(flight.sequences, result.sampled_ids, strict=True):
                sequence.request.num_computed_tokens -= token_id == REJECTED
        updates: list[RequestUpdate] = []
        finished = RequestStatus.FINISHED
        for index, (sequence, token_id) in enumerate(zip(flight.sequences, result.sampled_ids, strict=True)):
            request = sequence.request
            if token_id < 0 or request.status is finished or sequence.drop_tokens:
                if token_id == NOT_FINITE and request.status is not finished and not sequence.drop_tokens:
                    ended = self._end_not_finite(sequence, now)
                    if updates and updates[-1].request is request:
                        # The result also has an earlier, valid token of the request. The error is sent with that token.
                        updates[-1].error = NOT_FINITE_ERROR
                    else:
                        updates += ended
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
                self.finish(sequence, FinishReason.STOP, now)
            elif len(output_token_ids) >= sequence.max_output_tokens:
                self.finish(sequence, FinishReason.LENGTH, now)
        if self._state.limits.fairness and self._state.intake.has_tenants:
            self._state.intake.order.charge_outputs(update.request for update in updates if update.index >= 0)
        if flight.step.num_drafts:
            _count_later(updates)
        return updates

    def _end_not_finite(self, sequence: Sequence, now: float) -> list[RequestUpdate]:
        """Ends a request whose logits are NaN or infinite.

        The request's blocks must not be cached. All blocks leave the prefix cache, because a cached block may be the
        cause.
        """
        sequence.drop_tokens = True
        self._supply.lose_all()
        return self.end_all([sequence], NOT_FINITE_ERROR, now)

    def _note_prefixes(self, flight: InFlightStep) -> None:
        """After a completed step, adds the computed blocks of its prompts to the prefix cache."""
        step = flight.step
        for index in range(flight.first_chunk, len(flight.sequences)):
            sequence = flight.sequences[index]
            if not sequence.drop_tokens:
                self._supply.computed(sequence, step.starts[index] + step.query_lens[index])

    def _note_token(self, sequence: Sequence, now: float) -> None:
        """Updates the times and the receipt (times of the phases) of a sequence that gets a token."""
        request = sequence.request
        if request.first_token_time is None:
            request.first_token_time = now
        if sequence.state is SequenceState.RUNNING and request.receipt.phase is not Phase.DECODE:
            request.receipt.enter(Phase.DECODE, now)
        sequence.notes_tokens = request.receipt.phase is not Phase.DECODE


def void_steps(in_flight: InFlightSteps) -> list[int]:
    """Returns the numbers of the steps whose requests have all ended, the last step first. The executor may drop
    these steps.

    A step is not in the result if one of its sequences is also in a later step that must run. The later step needs the
    state that the earlier step leaves in the batch row.
    """
    void: list[int] = []
    kept: set[Sequence] = set()
    for flight in reversed(list(in_flight)):
        if not flight.sequences:
            continue  # the step only copies blocks to KV tiers or from them
        if all(sequence.request.is_finished and sequence not in kept for sequence in flight.sequences):
            void.append(flight.step.seq)
        else:
            kept.update(flight.sequences)
    return void


def _is_arriving(sequence: Sequence) -> bool:
    """Returns True if a step may copy blocks of another replica to the device for this sequence now."""
    return sequence.hand_over is HandOverState.ARRIVING and sequence.state is SequenceState.RUNNING


def _has_foreign_blocks(sequence: Sequence) -> bool:
    """Returns True if another replica may have computed blocks of this sequence. These are blocks from a hand-over, and
    blocks of the prefix cache, which may come from an earlier hand-over or a KV tier.
    """
    chain = sequence.prefix_chain
    return sequence.num_handed > 0 or _is_arriving(sequence) or (chain is not None and chain.num_adopted > 0)


def _count_later(updates: list[RequestUpdate]) -> None:
    """Sets ``num_later`` of each update. The updates of a request must be consecutive."""
    for update, after in zip(reversed(updates[:-1]), reversed(updates[1:]), strict=True):
        if after.request is update.request:
            update.num_later = after.num_later + 1


def _shape_error(step: ScheduledStep, result: StepResult) -> str | None:
    """Returns a description of the difference if the result does not have the shape that the step demands, otherwise
    None.
    """
    if result.aborted:
        return None
    sizes = {len(result.sampled_ids), len(result.logits), len(result.logsumexps)}
    if sizes != {step.num_seqs}:
        return f"step {step.seq} has {step.num_seqs} sequences, its result has columns of {sorted(sizes)}"
    if step.kind is StepKind.DECODE:
        if min(result.sampled_ids, default=0) >= 0:  # the usual case
            return None
        wrong = -1 in result.sampled_ids
    else:
        wrong = any((token == -1) is samples for token, samples in zip(result.sampled_ids, step.do_sample, strict=True))
    wrong = wrong or not _may_reject(step, result.sampled_ids)
    return f"step {step.seq} has a sampled token where do_sample is False, or none where it is True" if wrong else None


def _may_reject(step: ScheduledStep, sampled_ids: list[int]) -> bool:
    """Returns True if each rejected token was sampled after a draft, and all later drafts are rejected, too."""
    if min(sampled_ids, default=0) >= NOT_FINITE:
        return True
    rows = step.rows
    for index, token_id in enumerate(sampled_ids):
        is_draft = bool(step.num_drafts and index and rows[index] == rows[index - 1])
        if token_id < REJECTED or (token_id == REJECTED and not is_draft):
            return False
        if is_draft and token_id != REJECTED and sampled_ids[index - 1] < 0:
            return False
    return True
