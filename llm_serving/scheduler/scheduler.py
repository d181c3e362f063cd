"""The parts of a scheduler, put together as its limits say.

The policy of a name, wired to what it composes steps with.

The scheduler: a pure state machine from requests to steps. No clock, no IO, no threads.

The engine calls ``schedule`` until it gives None, hands every step to the executor, and calls ``update`` with each
answer. What holds at all times:

* A sequence gets steps while it runs; it keeps its row and its blocks until no step in flight touches them.
* Running sequences are in order of arrival. The oldest is never preempted, so somebody always gets on.
* ``num_computed_tokens == num_tokens + num_inflight_tokens - 1`` for a running sequence past its prefill: the next
  decode writes the keys and values of the last sampled token, which sits at that position.
* A step's tokens depend on its sequences' own tokens alone, so it does not matter when and how often one is
  preempted, what of it was found in the cache, or in which chunks it was computed: the keys and values are the same
  bits, and so is the next token.

Which part decides what: ``batching`` who may start, ``Starter`` whether there is room, ``policies`` which kind of
step comes next, the composers what is in it, ``Lifecycle`` what becomes of a sequence, ``Swapper`` what moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from llm_serving.errors import ProtocolError, QueueFullError
from llm_serving.kvcache.kv_cache_manager import KVCacheManager
from llm_serving.request import FinishReason, Request
from llm_serving.scheduler.admission import make_admission
from llm_serving.scheduler.batching import Starter, select_batching
from llm_serving.scheduler.block_supply import make_block_supply
from llm_serving.scheduler.decode_steps import DecodeComposer
from llm_serving.scheduler.figures import SchedulerFigures, StartRoom
from llm_serving.scheduler.intake import RequestQueue
from llm_serving.scheduler.lifecycle import AnswerReader, Lifecycle, note_expiry, shape_error
from llm_serving.scheduler.limits import Policy, SchedulerLimits
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepKind, StepResult
from llm_serving.scheduler.policies import Chunked, DecodeFirst, Fcfs, PrefillFirst, SchedulingPolicy, StepComposers
from llm_serving.scheduler.preemption import PreemptionChoice, Swapper
from llm_serving.scheduler.prefill_steps import MixedComposer, PrefillComposer
from llm_serving.scheduler.running import RunningSet
from llm_serving.scheduler.sequence import Sequence, SequenceState
from llm_serving.scheduler.slo import Slo
from llm_serving.scheduler.slo_order import SloOrder, make_order
from llm_serving.scheduler.snapshot import RequestCodec, Sequences, Stateful
from llm_serving.scheduler.state import InFlightStep, InFlightSteps, SchedulerState

__all__ = ["Scheduler"]

_POLICIES: dict[Policy, type[SchedulingPolicy]] = {
    Policy.PREFILL_FIRST: PrefillFirst,
    Policy.FCFS: Fcfs,
    Policy.DECODE_FIRST: DecodeFirst,
    Policy.CHUNKED: Chunked,
    Policy.SLO: Slo,
}


def _make_composers(
    state: SchedulerState, starter: Starter, preempt: Callable[[Sequence, float], None]
) -> StepComposers:
    """Returns the composers that every policy chooses from."""
    policy = state.limits.policy
    prefills = PrefillComposer(state, starter)
    decodes = DecodeComposer(state, preempt, prefill_answered=policy is Policy.DECODE_FIRST)
    mixed = MixedComposer(state, decodes, prefills, starter)
    return StepComposers(prefills, decodes, mixed)


class Scheduler:
    """Batches sequences over blocks of a KV cache. Times (``now``) are seconds on any clock that never goes back."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._kv_cache = KVCacheManager(
            limits.num_blocks,
            limits.block_size,
            prefix_cache=limits.prefix_cache,
            contiguous=not limits.page_attention,
            namespace=limits.cache_namespace,
            num_host_blocks=limits.num_host_blocks,
        )
        self._supply = make_block_supply(limits, self._kv_cache)
        order = make_order(limits)
        self._waiting = RequestQueue(limits.max_waiting_requests, limits.max_waiting_tokens, order)
        self._running = RunningSet(self._kv_cache, self._supply, limits.max_num_seqs)
        self._in_flight = InFlightSteps()
        self._state = SchedulerState(limits, self._kv_cache, order, self._waiting, self._running, self._in_flight)
        self._swapper = Swapper(self._state)
        self._preemption = PreemptionChoice(limits.preemption, limits.block_size)
        self._admission = make_admission(limits)
        self._lifecycle = Lifecycle(self._state, self._swapper, self._preemption, self._admission)
        self._answers = AnswerReader(self._lifecycle, self._waiting, self._supply, fairness=limits.fairness)
        batching = select_batching(self._state)
        starter = Starter(self._state, batching, self._supply, self._admission)
        composers = _make_composers(self._state, starter, self._lifecycle.preempt)
        self._policy: SchedulingPolicy = _POLICIES[limits.policy](self._state, composers)
        self._parts: dict[str, Stateful] = {
            "state": self._state,
            "swapper": self._swapper,
            "preemption": self._preemption,
            "admission": self._admission,
            "batching": batching,
            "composers": composers,
            "policy": self._policy,
        }
        self._ended: list[RequestUpdate] = []
        self.figures = SchedulerFigures(self._state, self._lifecycle)

    @property
    def is_idle(self) -> bool:
        """No request, and no step in flight."""
        return not self._lifecycle.sequences and not self._in_flight.num_steps

    # Requests

    def add_request(self, request: Request) -> None:
        """Take a request in. Raises ContextLengthError when it can never be served, QueueFullError when the queue
        is full, RequestError when its id is taken; then nothing has changed."""
        self._lifecycle.add(request)

    def queue_full(self) -> QueueFullError | None:
        """Why a request would be refused now, however short; None when it may be taken in. Any thread may ask: it is
        for refusing before a request is even read, and ``add_request`` has the last word."""
        try:
            self._waiting.check_room(1, self._running.num_free_rows)
        except QueueFullError as error:
            return error.with_traceback(None)  # its frames know their callers, which will hold it: cycles
        return None

    def finish_request(self, request_id: str, reason: FinishReason, now: float) -> RequestUpdate | None:
        """End a request from outside: aborted, or a stop string was found. None when it is not (any longer) here.

        Its blocks are free at once, or as soon as the steps in flight that touch them are answered.
        """
        sequence = self._lifecycle.sequences.get(request_id)
        if sequence is None:
            return None
        self._lifecycle.finish(sequence, reason, now)
        return RequestUpdate(sequence.request)

    def abort_request(self, request_id: str, now: float) -> RequestUpdate | None:
        """``finish_request`` with ``FinishReason.ABORT``."""
        return self.finish_request(request_id, FinishReason.ABORT, now)

    def fail_all(self, error: str, now: float) -> list[RequestUpdate]:
        """End every request with ``FinishReason.ERROR``."""
        return self._end_all(list(self._lifecycle.sequences.values()), error, now)

    # For a router that stands before several schedulers

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._lifecycle.sequences)

    def place_request(self, request: Request, arrival_index: int, now: float) -> None:
        """Take in a request that a router has chosen this scheduler for; ``arrival_index`` orders it among all
        requests of the router. It may have run elsewhere, and goes on with the tokens it has. The router has looked
        after the bounds of the queue, and knows that the id is not taken."""
        self._lifecycle.place(request, arrival_index, now)

    def release_requests(self, request_ids: Iterable[str]) -> None:
        """Waiting requests go elsewhere; nothing is left of them here."""
        for request_id in request_ids:
            self._lifecycle.release(request_id)

    def start_room(self) -> StartRoom:
        """What is free for requests to start, and who waits for it. Changes nothing."""
        return StartRoom.of(self._state)

    def known_prefix(self, hashes: Iterable[bytes]) -> tuple[int, int]:
        """See ``KVCacheManager.known_prefix``."""
        return self._kv_cache.known_prefix(hashes)

    @property
    def prefill_estimate(self) -> tuple[float, float]:
        """What policy ``slo`` has learnt of prefills, see ``SloOrder.estimate``; zeros under others."""
        order = self._state.order
        return order.estimate if isinstance(order, SloOrder) else (0.0, 0.0)

    # Steps

    def schedule(self, now: float) -> ScheduledStep | None:
        """The next step, or None when there is nothing to do until ``update``, a new request or ``next_wakeup``.

        Requests that have waited past their deadline end here, see ``take_ended``.
        """
        self._end_expired(now)
        self._state.wakeup = self._waiting.next_deadline
        # Composing a step may preempt, and a victim without steps in flight can be moved at once.
        return self._swapper.next_step() or self._policy.next_step(now) or self._swapper.next_step()

    def take_ended(self) -> list[RequestUpdate]:
        """The last updates of requests that ``schedule`` itself ended, since the last call."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def has_ended_updates(self) -> bool:
        """True if ``take_ended`` has updates to return."""
        return bool(self._ended)

    def sequences(self) -> list[Sequence]:
        """Returns all sequences that have not ended, or whose blocks a step in flight still uses."""
        by_index = {s.arrival_index: s for s in [*self._lifecycle.sequences.values(), *self._running.leaving]}
        return list(by_index.values())

    def steps_in_flight(self) -> list[ScheduledStep]:
        """Returns the steps in flight, in the order in which they were scheduled."""
        return [flight.step for flight in self._in_flight]

    def next_wakeup(self, now: float) -> float | None:
        """When to call ``schedule`` again though nothing has happened: the end of a batch's waiting time, if the
        last ``schedule`` held a batch back, or a request's deadline."""
        wakeup = self._state.wakeup
        return None if wakeup is None else max(wakeup, now)

    def update(self, result: StepResult, now: float) -> list[RequestUpdate]:
        """Take a step's answer: tokens, or the end of the step's requests when it failed.

        Raises ProtocolError when no such step is in flight.
        """
        if result.seq not in self._in_flight:
            raise ProtocolError(f"step {result.seq} was answered but is not in flight")
        flight = self._in_flight.pop(result.seq)
        self._kv_cache.end_copies(flight.copies)
        self._policy.step_answered(flight.step, result)
        self._preemption.step_answered(flight.step, result)
        self._admission.step_answered()
        updates = self._take(flight, result, now)
        if self._running.num_leaving:
            for sequence in flight.sequences:
                self._lifecycle.settle(sequence)
        return updates

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
        """Every step in flight is void, cache and host memory are lost. All requests wait, with their known tokens."""
        for flight in self._in_flight:
            self._kv_cache.end_copies(flight.copies)
        self._in_flight.clear()
        self._supply.lose_all()
        self._lifecycle.lose_device(now)
        self._policy.reset()

    def snapshot(self, codec: RequestCodec) -> dict[str, Any]:
        """Returns the whole state as plain data, see ``llm_serving.scheduler.snapshot``."""
        if self._ended:
            raise AssertionError("take_ended must come before a snapshot")
        lifecycle, supply, kv_cache = self._lifecycle, self._supply, self._kv_cache
        contents = codec.block_contents(kv_cache.prefix_index) if self.limits.prefix_cache else []
        return {
            "kv_cache": kv_cache.snapshot(contents),
            "sequences": [
                sequence.snapshot(codec.save_request(sequence.request), codec.chain_tokens, supply.version)
                for sequence in self.sequences()
            ],
            "requests": [sequence.arrival_index for sequence in lifecycle.sequences.values()],
            "counters": [lifecycle.num_preemptions, lifecycle.num_swaps],
            "parts": {name: part.snapshot() for name, part in self._parts.items()},
        }

    def restore(self, state: dict[str, Any], codec: RequestCodec) -> int:
        """Restores what ``snapshot`` returned. The scheduler must be new and have the same limits.

        Returns the number of cached blocks that cannot be found any more. If one of them is replaced later, decisions
        can differ from those of the saved scheduler."""
        num_lost = self._kv_cache.restore(state["kv_cache"])
        sequences: Sequences = {}
        for saved in state["sequences"]:
            request = codec.load_request(saved["request"])
            sequence = Sequence.restored(saved, request, self._kv_cache, self._supply.version)
            sequences[sequence.arrival_index] = sequence
        requests = [sequences[index] for index in state["requests"]]
        self._lifecycle.sequences = {sequence.request.request_id: sequence for sequence in requests}
        self._lifecycle.num_preemptions, self._lifecycle.num_swaps = state["counters"]
        for name, part in self._parts.items():
            part.restore(state["parts"][name], sequences)
        return num_lost

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block and row is held once or free, and counts agree with the steps
        in flight. When idle that means: all free. Costs in proportion to what is held; next to nothing when idle."""
        self._lifecycle.check_integrity()

    def _take(self, flight: InFlightStep, result: StepResult, now: float) -> list[RequestUpdate]:
        error = result.error or shape_error(flight.step, result)
        if error is not None:
            for sequence in flight.sequences:
                sequence.drop_tokens = True
            return self._end_all(flight.sequences, error, now)
        if result.aborted:
            self._lifecycle.start_again(flight.sequences, now)
            return []
        if flight.step.kind is StepKind.MOVE:
            self._swapper.moved(flight.step.moves[0].kind, flight.sequences)
            return []
        return self._answers.take(flight, result, now)

    def _end_all(self, sequences: list[Sequence], error: str, now: float) -> list[RequestUpdate]:
        updates = []
        for sequence in sequences:
            if not sequence.request.is_finished:
                self._lifecycle.finish(sequence, FinishReason.ERROR, now)
                updates.append(RequestUpdate(sequence.request, error=error))
        return updates

    def _end_expired(self, now: float) -> None:
        for sequence in self._waiting.pop_expired(now):
            sequence.state = SequenceState.GONE
            self._lifecycle.finish(sequence, FinishReason.ABORT, now)
            self._ended.append(note_expiry(sequence.request, now))
