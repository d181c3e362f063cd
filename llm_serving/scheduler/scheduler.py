"""The scheduler: a state machine that turns requests into steps. It has no clock, no input or output, and no threads.

The engine calls ``schedule`` until it returns None, sends each step to the executor, and calls ``update`` with each
result. The following statements always hold:

* A sequence gets steps while it runs. It keeps its batch row and its blocks until no step in flight uses them.
* Running sequences are in order of arrival. The oldest is preempted only if it runs alone, so one sequence always
  advances.
* For a running sequence after its prefill: ``num_computed_tokens == num_tokens + num_inflight_tokens - 1``. The next
  decode step writes the keys and values of the last sampled token at position ``num_computed_tokens``.
* The tokens of a sequence depend on its own tokens only. Preemption, the prefix cache and the size of chunks change no
  bit of the keys and values. So they do not change the next token.

The parts of the scheduler have these tasks. The policy decides which kind of step comes next. The ``StepComposer``
decides which sequences are in the step. The ``Starter`` and the batching mode decide which requests start.
``Lifecycle`` and ``Preemption`` change the state of sequences.
"""

from __future__ import annotations

from collections.abc import Iterable

from llm_serving.admission.batching import make_batching_mode
from llm_serving.admission.controls import make_admission
from llm_serving.admission.light_keys import LightKeys
from llm_serving.admission.starter import Starter
from llm_serving.block_moves.block_mover import next_move
from llm_serving.block_moves.swapping import Swapper
from llm_serving.block_moves.tier_moves import SchedulerTiers, TierMoves
from llm_serving.block_supply.setup import make_block_supply, plan_states
from llm_serving.block_supply.tier_supply import TierSupply
from llm_serving.errors import AgentLostTwiceError, ProtocolError, QueueFullError
from llm_serving.kvcache.kv_cache_manager import KVCacheManager
from llm_serving.kvcache.prefix_index import IndexObserver
from llm_serving.policies.setup import make_policy
from llm_serving.request import FinishReason, Request
from llm_serving.scheduler.drafts import offer_drafts
from llm_serving.scheduler.figures import SchedulerFigures
from llm_serving.scheduler.for_router import RoutedScheduler
from llm_serving.scheduler.lifecycle import Lifecycle, void_steps
from llm_serving.scheduler.limits import Policy, SchedulerLimits
from llm_serving.scheduler.mixed import MixedComposer
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult
from llm_serving.scheduler.preemption import Preemption
from llm_serving.scheduler.quarantine import Quarantine, note_loss
from llm_serving.scheduler.running import RunningSet
from llm_serving.scheduler.state import InFlightSteps, SchedulerState
from llm_serving.scheduler.whole_state import SavedScheduler
from llm_serving.waiting.intake import Intake
from llm_serving.waiting.slo_order import make_order


class Scheduler(SchedulerFigures, RoutedScheduler, SchedulerTiers, SavedScheduler):
    """Schedules the steps of one replica, whose sequences share the blocks of a KV cache.

    Times (``now``) are seconds on a clock that never goes back.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._kv_cache = KVCacheManager(
            limits.num_blocks,
            limits.block_size,
            prefix_cache=limits.prefix_cache,
            contiguous=not limits.page_attention,
            namespace=limits.cache_namespace,
            num_host_blocks=limits.num_host_blocks,
            copies_tails=limits.copies_tails,
        )
        self._supply = make_block_supply(limits, self._kv_cache)
        self._intake = Intake(limits, make_order(limits))
        self._running = RunningSet(self._kv_cache, self._supply, limits.max_num_seqs)
        self._in_flight = InFlightSteps()
        self._states = plan_states(self._supply, self._in_flight) if limits.num_state_snapshots else None
        self._state = SchedulerState(limits, self._kv_cache, self._intake, self._running, self._in_flight)
        self._admission = make_admission(limits)
        self._swapper = Swapper(self._state) if limits.num_host_blocks else None
        self._hand_overs = None
        if limits.hands_over:
            from llm_serving.block_moves.hand_overs import HandOvers  # needed only if replicas have roles

            self._hand_overs = HandOvers(self._state, self._supply)
        self._movers = [mover for mover in (self._hand_overs, self._swapper) if mover is not None]
        self._preemption = Preemption(self._state, self._admission, self._movers)
        self._lifecycle = Lifecycle(self._state, self._supply, self._preemption, self._admission, self._hand_overs)
        self._batching = make_batching_mode(self._state)
        self._light_keys = LightKeys(self._state)
        self._tiers = None
        if limits.has_tiers:
            assert isinstance(self._supply, TierSupply), "make_block_supply chooses it for tiers"
            self._tiers = TierMoves(self._state, self._supply)
        must_load = None if self._tiers is None else self._tiers.must_wait
        starter = Starter(self._state, self._batching, self._supply, self._admission, self._light_keys, must_load)
        self._composer = MixedComposer(
            self._state,
            starter,
            self._preemption.preempt,
            self._light_keys,
            waits_for_prefill=limits.policy is Policy.DECODE_FIRST,
        )
        self._policy = make_policy(self._state, self._composer)
        self._quarantine = Quarantine(self._state, starter, self._composer, self._swapper)
        self._may_have_suspects = False
        """True once a request was in flight when its agent was lost."""

    # The following methods admit and end requests.

    def add_request(self, request: Request) -> None:
        """Admits a request.

        Raises ContextLengthError if the request can never be served, QueueFullError if the queue is full, and
        RequestError if its id is in use. In these cases, nothing has changed.
        """
        self._intake.add(request, self._running.num_free_rows)

    def queue_full(self, tenant: str = "", num_coming: int = 0) -> QueueFullError | None:
        """Returns the error with which a request of a tenant would be refused now, or None. Any thread may call it.

        With this method, the server can refuse a request before it reads the body. ``add_request`` makes the final
        decision. ``num_coming`` is the number of requests that will be added before.
        """
        return self._intake.queue_full(self._running.num_free_rows, tenant, num_coming)

    def finish_request(self, request_id: str, reason: FinishReason, now: float) -> RequestUpdate | None:
        """Ends a request for a reason that comes from outside the scheduler: an abort, or a stop string.

        Returns the last update, or None for an unknown id. The request's blocks become free when no step in flight uses
        them.
        """
        sequence = self._intake.sequences.get(request_id)
        if sequence is None:
            return None
        self._lifecycle.finish(sequence, reason, now)
        return RequestUpdate(sequence.request)

    def fail_all(self, error: str, now: float) -> list[RequestUpdate]:
        """Ends every request with ``FinishReason.ERROR``."""
        return self._lifecycle.end_all(list(self._intake.sequences.values()), error, now)

    def take_ended(self) -> list[RequestUpdate]:
        """Returns the last updates of requests that the scheduler has ended by itself. Returns each update once.

        ``schedule`` ends requests at their deadline. ``agent_lost`` ends a suspect that was the only request in flight
        when its agent was lost again.
        """
        return self._intake.take_ended()

    # The following methods schedule steps and process their results.

    def offer_drafts(self, offers: Iterable[tuple[str, list[int]]]) -> None:
        """Offers guesses of the tokens that follow the known tokens of running requests, by request id.

        The next decode step of a request verifies as many of its guesses as fit. This step is sent only when no other
        step of the request is in flight. An offer replaces an earlier one, and an empty offer withdraws it. An offer is
        void when the request gets a token. Offers for requests that do not decode, or whose guesses are in flight, have
        no effect. Guesses never change the tokens of a request.
        """
        offer_drafts(self._state, offers)

    def schedule(self, now: float) -> ScheduledStep | None:
        """Returns the next step, or None. After None, call this method again after ``update``, a new request or the
        ``next_wakeup``.

        Also ends the requests that have waited until their deadline, see ``take_ended``.
        """
        deadline = self._intake.next_deadline
        if deadline is not None and deadline <= now:
            for sequence in self._intake.expire(now):
                self._state.note_ended(sequence)
            deadline = self._intake.next_deadline
        self._state.wakeup = deadline
        tiers = self._tiers
        if tiers is not None and (load := tiers.next_load()) is not None:
            return load
        if self._may_have_suspects and self._quarantine.is_active:
            is_alone, step = self._quarantine.next_step(now)
            if is_alone:
                return step
        return self._next_step(now) or (None if tiers is None else tiers.next_store())

    def _next_step(self, now: float) -> ScheduledStep | None:
        movers = self._movers
        if not movers:
            return self._policy.next_step(now)
        # The policy may preempt a sequence that no step in flight uses. The second ``next_move`` then moves its blocks.
        return next_move(movers) or self._policy.next_step(now) or next_move(reversed(movers))

    def next_wakeup(self, now: float) -> float | None:
        """Returns the time at which ``schedule`` must be called even without an event, or None.

        This is the next deadline of a request, or the time until which the scheduler holds back a step or a start.
        """
        wakeup = self._state.wakeup
        return None if wakeup is None else max(wakeup, now)

    def update(self, result: StepResult, now: float) -> list[RequestUpdate]:
        """Processes the result of a step: appends its tokens to the requests. If the step failed, ends its requests
        with an error.

        Raises ProtocolError if no step with this number is in flight.
        """
        if result.seq not in self._in_flight:
            raise ProtocolError(f"step {result.seq} has a result but is not in flight")
        flight = self._in_flight.pop(result.seq)
        self._kv_cache.end_copies(flight.copies)
        self._policy.step_completed(flight.step, result)
        for mover in self._movers:
            mover.step_completed(flight.step, result)
        if self._tiers is not None:
            self._tiers.step_completed(flight.step, result)
        self._admission.step_completed()
        return self._lifecycle.take_result(flight, result, now)

    def void_steps(self) -> list[int]:
        """Returns the numbers of the steps in flight that may be dropped, because all their requests have ended."""
        return void_steps(self._in_flight)

    def agent_lost(self, now: float, *, blameless: bool = False) -> None:
        """Drops all steps in flight, because the agent, its KV cache and its host memory are lost. All requests wait
        for a new prefill.

        Requests of the steps in flight become suspects. A suspect that loses its agent again may end with an error, see
        ``quarantine`` and ``take_ended``. ``blameless`` means that no request caused the loss, so none becomes a
        suspect.
        """
        culprit = None if blameless else note_loss(self._in_flight)
        self._may_have_suspects = self._may_have_suspects or not blameless
        for flight in self._in_flight:
            self._kv_cache.end_copies(flight.copies)
        self._in_flight.clear()
        if self._tiers is not None:
            self._tiers.lose()
        self._supply.lose_all()
        self._lifecycle.lose_device(now)
        self._policy.reset()
        if culprit is not None:
            self._lifecycle.finish(culprit, FinishReason.ERROR, now)
            self._intake.note_ended([RequestUpdate(culprit.request, error=AgentLostTwiceError.TEXT)])

    def observe_cache(self, observer: IndexObserver) -> None:
        """Reports each change of the prefix cache to ``observer``. Without this cache, there are no reports."""
        self._kv_cache.prefix_index.observer = observer

