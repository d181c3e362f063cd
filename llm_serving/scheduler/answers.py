"""What a step's answer means: tokens for its sequences, ends, and prefixes that are computed now."""

from __future__ import annotations

from llm_serving.request import FinishReason, RequestStatus
from llm_serving.scheduler.block_supply import BlockSupply
from llm_serving.scheduler.in_flight import InFlightStep
from llm_serving.scheduler.lifecycle import Lifecycle
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepKind, StepResult
from llm_serving.scheduler.request_queue import RequestQueue
from llm_serving.scheduler.sequence import Sequence, SequenceState
from llm_serving.telemetry.receipt import Phase

__all__ = ["AnswerReader", "shape_error"]


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
