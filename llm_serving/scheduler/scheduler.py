"""The scheduler: a pure state machine from requests to steps. No clock, no IO, no threads.

The engine calls ``schedule`` until it gives None, hands every step to the executor, and calls ``update`` with each
answer. What holds at all times:

* A sequence gets steps while it runs; it keeps its row and its blocks until no step in flight touches them.
* Running sequences are in order of arrival. The latest is preempted first, the oldest never.
* ``num_computed_tokens == num_tokens + num_inflight_tokens - 1`` for a running sequence past its prefill: the next
  decode writes the keys and values of the last sampled token, which sits at that position.
* A step's tokens depend on its sequences' own tokens alone, so it does not matter when and how often one is
  preempted: recomputing prompt and output gives the same bits and the same next token.
"""

from __future__ import annotations

from llm_serving.errors import ProtocolError, RequestError
from llm_serving.kvcache.kv_cache_manager import KVCacheManager
from llm_serving.receipt import Phase
from llm_serving.request import FinishReason, Request, RequestStatus
from llm_serving.scheduler.batching.select import select_batching
from llm_serving.scheduler.in_flight import InFlightStep, InFlightSteps
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepKind, StepResult
from llm_serving.scheduler.policies.select import make_policy
from llm_serving.scheduler.request_queue import RequestQueue
from llm_serving.scheduler.running import RunningSet
from llm_serving.scheduler.sequence import Sequence, SequenceState
from llm_serving.scheduler.starting import Starter
from llm_serving.scheduler.state import SchedulerState

__all__ = ["Scheduler"]


class Scheduler:
    """Continuous batching over paged blocks. Times (``now``) are seconds on any clock that never goes back."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.num_preemptions = 0
        self.num_swaps = 0
        self.num_swapped = 0
        self.kv_waste = 0.0
        self.prefix_hit_tokens = 0
        self.prefix_query_tokens = 0
        self._kv_cache = KVCacheManager(limits.num_blocks, limits.block_size)
        self._waiting = RequestQueue(limits.max_waiting_requests, limits.max_waiting_tokens)
        self._running = RunningSet(self._kv_cache, limits.max_num_seqs)
        self._in_flight = InFlightSteps()
        self._state = SchedulerState(limits, self._waiting, self._running, self._in_flight)
        self._policy = make_policy(self._state, Starter(self._state, select_batching(self._state)), self._preempt)
        self._sequences: dict[str, Sequence] = {}

    @property
    def num_running(self) -> int:
        """Requests with a row and blocks, but for those that only wait for their last steps to be answered."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks, those preempted among them."""
        return len(self._sequences) - len(self._running)

    @property
    def num_blocks(self) -> int:
        """Blocks that can be given to sequences."""
        return self._kv_cache.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._kv_cache.num_free_blocks

    @property
    def num_steps_in_flight(self) -> int:
        return self._in_flight.num_steps

    @property
    def is_idle(self) -> bool:
        """No request, and no step in flight."""
        return not self._sequences and not self._in_flight.num_steps

    def add_request(self, request: Request) -> None:
        """Take a request in. Raises ContextLengthError when it can never be served, QueueFullError when the queue
        is full, RequestError when its id is taken; then nothing has changed."""
        if request.request_id in self._sequences:
            raise RequestError(f"a request with the id {request.request_id!r} is being served", param="request_id")
        max_output_tokens = self.limits.max_output_tokens(request)
        self._waiting.check_room(request.num_tokens, self._running.num_free_rows)
        sequence = Sequence(request, self._state.num_arrivals, max_output_tokens)
        self._state.num_arrivals += 1
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)

    def schedule(self, now: float) -> ScheduledStep | None:
        """The next step, or None when there is nothing to do until ``update``, a new request or ``next_wakeup``."""
        self._state.wakeup = None
        return self._policy.next_step(now)

    def take_ended(self) -> list[RequestUpdate]:
        """The last updates of requests that ``schedule`` itself ended, since the last call."""
        return []

    def next_wakeup(self, now: float) -> float | None:
        """When to call ``schedule`` again though nothing has happened: the end of a batch's waiting time, if the
        last ``schedule`` held a batch back."""
        wakeup = self._state.wakeup
        return None if wakeup is None else max(wakeup, now)

    def update(self, result: StepResult, now: float) -> list[RequestUpdate]:
        """Take a step's answer: tokens, or the end of the step's requests when it failed.

        Raises ProtocolError when no such step is in flight.
        """
        if result.seq not in self._in_flight:
            raise ProtocolError(f"step {result.seq} was answered but is not in flight")
        flight = self._in_flight.pop(result.seq)
        self._policy.step_answered(flight.step, result)
        error = result.error or _shape_error(flight.step, result)
        if error is not None:
            updates = self._end_all(flight.sequences, FinishReason.ERROR, error, now)
        elif result.aborted:
            updates = []
            self._recompute(flight)
        else:
            updates = self._take_tokens(flight, result, now)
        for sequence in flight.sequences:
            if sequence.state is SequenceState.LEAVING:
                self._settle(sequence)
        return updates

    def finish_request(self, request_id: str, reason: FinishReason, now: float) -> RequestUpdate | None:
        """End a request from outside: aborted, or a stop string was found. None when it is not (any longer) here.

        Its blocks are free at once, or as soon as the steps in flight that touch them are answered.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        self._finish(sequence, reason, now)
        return RequestUpdate(sequence.request)

    def abort_request(self, request_id: str, now: float) -> RequestUpdate | None:
        """``finish_request`` with ``FinishReason.ABORT``."""
        return self.finish_request(request_id, FinishReason.ABORT, now)

    def void_steps(self) -> list[int]:
        """Steps in flight that are not worth running if they have not begun, the last first: drop them in this order.

        All their requests have ended, and no step that stays comes after one of them on the same row, where it
        would find the state of a step that never ran.
        """
        void: list[int] = []
        kept: set[Sequence] = set()
        for flight in self._in_flight.latest_first():
            if all(sequence.request.is_finished and sequence not in kept for sequence in flight.sequences):
                void.append(flight.step.seq)
            else:
                kept.update(flight.sequences)
        return void

    def agent_lost(self, now: float) -> None:
        """Every step in flight is void and the cache is lost. All requests wait again, with their known tokens."""
        self._in_flight.clear()
        for sequence in list(self._running):
            sequence.request.receipt.enter(Phase.PREEMPTED, now)
            self._running.stop(sequence)
        for sequence in self._running.leaving:
            sequence.num_inflight_steps = 0
            self._settle(sequence)
        self._policy.reset()

    def fail_all(self, error: str, now: float) -> list[RequestUpdate]:
        """End every request with ``FinishReason.ERROR``."""
        return self._end_all(list(self._sequences.values()), FinishReason.ERROR, error, now)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block and row is held once or free, and counts agree with the steps
        in flight. When idle that means: all free. Costs in proportion to what is held; next to nothing when idle."""
        self._running.check_integrity()
        holders = [*self._running, *self._running.leaving]
        steps = dict.fromkeys(holders, 0)
        for flight in self._in_flight:
            for sequence in flight.sequences:
                steps[sequence] = steps.get(sequence, 0) + 1
        if steps != {sequence: sequence.num_inflight_steps for sequence in holders}:
            raise AssertionError("a step in flight touches a sequence without blocks, or is counted wrongly")
        unfinished = sum(not sequence.request.is_finished for sequence in holders)
        if unfinished + len(self._waiting) != len(self._sequences):
            raise AssertionError(
                f"{len(self._sequences)} requests: {unfinished} hold blocks, {len(self._waiting)} wait"
            )

    def _take_tokens(self, flight: InFlightStep, result: StepResult, now: float) -> list[RequestUpdate]:
        updates = []
        finished = RequestStatus.FINISHED
        for index, (sequence, token_id) in enumerate(zip(flight.sequences, result.sampled_ids, strict=True)):
            request = sequence.request
            if token_id < 0 or request.status is finished or sequence.drop_tokens:
                continue
            if request.first_token_time is None:
                request.first_token_time = now
            if request.receipt.phase is not Phase.DECODE:
                request.receipt.enter(Phase.DECODE, now)
            output_token_ids = request.output_token_ids
            output_token_ids.append(token_id)
            update = RequestUpdate(request, token_id, index)
            updates.append(update)
            if token_id in sequence.ending_token_ids:
                if token_id not in request.end_token_ids or request.sampling.ignore_eos:
                    update.stop_token_id = token_id
                self._finish(sequence, FinishReason.STOP, now)
            elif len(output_token_ids) >= sequence.max_output_tokens:
                self._finish(sequence, FinishReason.LENGTH, now)
        return updates

    def _end_all(self, sequences: list[Sequence], reason: FinishReason, error: str, now: float) -> list[RequestUpdate]:
        updates = []
        for sequence in sequences:
            if not sequence.request.is_finished:
                self._finish(sequence, reason, now)
                updates.append(RequestUpdate(sequence.request, error=error))
        return updates

    def _recompute(self, flight: InFlightStep) -> None:
        """The step never ran: what later steps say of its sequences is void, and they start again."""
        for sequence in flight.sequences:
            if not sequence.request.is_finished:
                sequence.drop_tokens = True
                if sequence.state is SequenceState.RUNNING:
                    self._running.stop(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        request = sequence.request
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.finish_time = now
        request.receipt.enter(Phase.DONE, now)
        del self._sequences[request.request_id]
        self._state.num_started -= request.first_scheduled_time is not None
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
            sequence.state = SequenceState.GONE
        elif sequence.state is SequenceState.RUNNING:
            self._running.stop(sequence)
        else:
            self._running.finish_leaving()
        self._settle(sequence)

    def _preempt(self, sequence: Sequence, now: float) -> None:
        """Take the blocks of a running sequence away: now, or when its steps in flight are answered."""
        self.num_preemptions += 1
        sequence.request.num_preemptions += 1
        sequence.request.receipt.enter(Phase.PREEMPTED, now)
        self._running.stop(sequence)
        self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """A leaving sequence that no step in flight touches is gone, or waits again."""
        if sequence.state is not SequenceState.LEAVING or sequence.num_inflight_steps:
            return
        self._running.release(sequence)
        if sequence.request.is_finished:
            sequence.state = SequenceState.GONE
        else:
            sequence.request.status = RequestStatus.WAITING
            sequence.state = SequenceState.WAITING
            self._waiting.put_back(sequence)


def _shape_error(step: ScheduledStep, result: StepResult) -> str | None:
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
