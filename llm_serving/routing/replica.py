"""One replica as the router sees it, and the engine: a scheduler with the requests that were placed there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llm_serving.kvcache.block_hash import hash_blocks, root_hash
from llm_serving.request import Request
from llm_serving.routing.placement import Candidate, Placed
from llm_serving.scheduler.limits import BatchingStrategy, Policy, SchedulerLimits
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from llm_serving.routing.router import Router

__all__ = ["Entry", "ReplicaScheduler", "Survey"]


class Entry:
    """A request in the router."""

    __slots__ = ("cached_tokens", "hashes", "is_paid", "replica", "request", "sequence")

    def __init__(self, sequence: Sequence) -> None:
        self.request: Request = sequence.request
        self.sequence = sequence
        """How the router's queue knows it."""
        self.replica: ReplicaScheduler | None = None
        """Where it was placed; None while it waits in the router's queue."""
        self.hashes: list[bytes] | None = None
        """Of the full blocks of its known tokens, once they were asked for."""
        self.cached_tokens = 0
        """Known tokens that were cached there when it was placed."""
        self.is_paid = False
        """Its tenant has paid for the prompt."""

    @property
    def has_run(self) -> bool:
        return self.request.first_scheduled_time is not None

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens to be computed until its end, if it gets all the output it may."""
        computed = self.request.num_computed_tokens or self.cached_tokens
        return max(self.sequence.max_cached_tokens - computed, 0)

    def block_hashes(self, limits: SchedulerLimits) -> list[bytes]:
        """Chained hashes of the full blocks that another sequence may have computed: not the one with its last
        token."""
        if self.hashes is None:
            tokens = self.sequence.known_tokens(0, self.request.num_tokens - 1)
            root = root_hash(limits.cache_namespace, self.request.cache_salt)
            self.hashes = hash_blocks(tokens, limits.block_size, root)
        return self.hashes


class Survey:
    """How a replica stands, at one moment: what does not depend on the request that is to be placed."""

    def __init__(self, scheduler: Scheduler, entries: Iterable[Entry]) -> None:
        self.room = scheduler.start_room()
        self.load = 0
        self.num_waiting_tokens = 0
        """Tokens of new requests that are not cached."""
        for entry in entries:
            self.load += entry.num_uncomputed_tokens
            if not entry.has_run:
                self.num_waiting_tokens += entry.request.num_tokens - entry.cached_tokens


class ReplicaScheduler:
    """A ``StepSource``. Every call goes through to the scheduler, and the router is told."""

    def __init__(self, router: Router, index: int, scheduler: Scheduler) -> None:
        self.index = index
        self.scheduler = scheduler
        self.figures = scheduler.figures
        self.entries: dict[str, Entry] = {}
        """Requests that were placed here and have not ended, in the order in which they came here."""
        self.is_live = False
        """Its agents are there."""
        self.num_placed = dict.fromkeys(Placed, 0)
        """Requests that were placed here, by why."""
        self.num_recalled = 0
        """Those that went elsewhere again: they could not start here, or the agents were lost."""
        self.load = 0
        """Tokens to be computed, when last looked at."""
        self._router = router
        self._limits = scheduler.limits
        self._most_waiting, self._most_waiting_tokens = _step_bounds(self._limits)

    # What the engine calls; see ``Scheduler``

    def schedule(self, now: float) -> ScheduledStep | None:
        self._router.place(now)
        self._router.asked(self.index)
        step = self.scheduler.schedule(now)
        self._router.take_expired(self.scheduler.take_ended())
        return step

    def next_wakeup(self, now: float) -> float | None:
        """The scheduler's, or when a request expires in the router's queue."""
        times = [self.scheduler.next_wakeup(now), self._router.next_wakeup(now)]
        return min((time for time in times if time is not None), default=None)

    def update(self, result: StepResult, now: float) -> list[RequestUpdate]:
        updates = self.scheduler.update(result, now)
        self._router.take_updates(updates)
        return updates

    def void_steps(self) -> list[int]:
        return self.scheduler.void_steps()

    def agent_lost(self, now: float) -> None:
        """Its requests are for others, or for itself when its agents are back."""
        self.scheduler.agent_lost(now)
        self.is_live = False
        self._router.recall(self, list(self.entries.values()), now)

    # What the router asks

    def survey(self) -> Survey:
        """O(n) in the requests here."""
        survey = Survey(self.scheduler, self.entries.values())
        self.load = survey.load
        return survey

    def candidate(self, entry: Entry, survey: Survey, *, is_late: bool) -> Candidate:
        """This replica for a request."""
        limits, room = self._limits, survey.room
        num_known = num_held = 0
        if limits.prefix_cache:
            num_known, num_held = self.scheduler.known_prefix(entry.block_hashes(limits))
        num_tokens = entry.request.num_tokens if limits.page_attention else entry.sequence.max_cached_tokens
        num_ahead = room.num_ahead(is_late=is_late, has_run=entry.has_run)
        holds = room.holds(-(-num_tokens // limits.block_size) - num_held, num_ahead)
        is_open = holds and num_ahead < self._most_waiting
        if num_ahead:
            is_open = is_open and survey.num_waiting_tokens < self._most_waiting_tokens
        return Candidate(self.index, survey.load, num_known * limits.block_size, holds, is_open)


def _step_bounds(limits: SchedulerLimits) -> tuple[int, int]:
    """Requests and tokens that may wait at a replica: as many as the next step, or batch, takes."""
    if limits.batching is BatchingStrategy.NONE:
        return 1, limits.max_num_batched_tokens
    if limits.batching is not BatchingStrategy.CONTINUOUS:
        return limits.max_batch_size, limits.max_batch_size * limits.max_prompt_len
    if limits.policy is Policy.CHUNKED:
        return limits.max_num_seqs, limits.mixed_step_tokens
    if limits.policy is Policy.SLO:
        return limits.max_num_seqs, limits.max_num_batched_tokens
    return limits.prefill_batch_size, limits.max_num_batched_tokens
