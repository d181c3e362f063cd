"""The router's view of a replica (a scheduler with its agents) and of the requests that it placed there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm_serving.kvcache.block_hash import hash_blocks, root_hash
from llm_serving.request import Request
from llm_serving.routing.placement import Candidate, Placed, Role
from llm_serving.scheduler.limits import BatchingStrategy, Policy, SchedulerLimits
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from llm_serving.handover.pool import Lease


class Entry:
    """A request that the router has accepted and that has not ended."""

    __slots__ = ("cached_tokens", "hashes", "is_paid", "lease", "must_stay", "replica", "request", "sequence", "trip")

    def __init__(self, sequence: Sequence) -> None:
        self.request: Request = sequence.request
        self.sequence = sequence
        """The request's sequence in the router's own ``Intake``. The replica's scheduler makes another one."""
        self.replica: RoutedReplica | None = None
        """The replica that has the request. None while it waits in the router's queue."""
        self.hashes: list[bytes] | None = None
        """Hashes of the full blocks of the request's tokens. None before the first use."""
        self.cached_tokens = 0
        """Number of the request's tokens that were in the replica's prefix cache when the router placed the request."""
        self.lease: Lease | None = None
        """The blocks of the hand-over pool that the request holds, or None."""
        self.trip: Trip | None = None
        """The transfer for which the request waits, outside of the router's queue. None if it waits for no transfer."""
        self.must_stay = False
        """True if a transfer of the request's blocks has failed. The request is then not handed over again."""
        self.is_paid = False
        """True if the tenant has been charged for the prompt, for fairness between tenants."""

    @property
    def has_run(self) -> bool:
        return self.request.first_scheduled_time is not None

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens that must still be computed if the output reaches its maximum length.

        Includes the cost of encoding the request's images, counted in tokens.
        """
        computed = self.request.num_computed_tokens or self.cached_tokens
        return max(self.sequence.max_cached_tokens - computed, 0) + self.request.tile_cost_after(computed)

    def block_hashes(self, limits: SchedulerLimits) -> list[bytes]:
        """Returns the chained hashes of the request's full blocks, for lookups in prefix caches.

        The last token is left out, because it must be computed in any case.
        """
        if self.hashes is None:
            tokens = self.sequence.known_tokens(0, self.request.num_tokens - 1)
            root = root_hash(limits.cache_namespace, self.request.cache_salt)
            self.hashes = hash_blocks(tokens, limits.block_size, root)
        return self.hashes


class Survey:
    """The load and the capacity of a replica at one time. Both are outdated as soon as another request is placed at the
    replica.

    The cost to compute both is O(n) for n requests of the replica.
    """

    def __init__(self, replica: RoutedReplica) -> None:
        self.capacity = replica.scheduler.capacity()
        self.load = 0
        self.num_waiting_tokens = 0
        """Number of uncached tokens of the replica's requests that have not run yet."""
        for entry in replica.entries.values():
            self.load += entry.num_uncomputed_tokens
            if not entry.has_run:
                self.num_waiting_tokens += entry.request.num_tokens - entry.cached_tokens


class RoutedReplica:
    """A replica behind the router: a scheduler and the requests that the router placed there."""

    def __init__(self, index: int, scheduler: Scheduler, role: Role = Role.BOTH) -> None:
        self.index = index
        self.role = role
        self.scheduler = scheduler
        self.entries: dict[str, Entry] = {}
        """Requests on this replica that have not ended, by id, in the order of their placement."""
        self.is_live = False
        """True while the replica's agents are ready."""
        self.is_gone = False
        """True if the replica's agents were lost and will not start again."""
        self.num_placed = dict.fromkeys(Placed, 0)
        """Number of requests that the router placed here since the start, by reason."""
        self.num_recalled = 0
        """Number of requests that the router took back, because they could not start here or because the agents were
        lost.
        """
        self.load = 0
        """Number of tokens that the replica still had to compute at the time of the last ``survey``."""
        self._limits = scheduler.limits
        self._max_waiting, self._max_waiting_tokens = _step_bounds(self._limits)

    def survey(self) -> Survey:
        """Returns the replica's present load and capacity."""
        survey = Survey(self)
        self.load = survey.load
        return survey

    def candidate(self, entry: Entry, survey: Survey, *, is_late: bool) -> Candidate:
        """Returns this replica as a candidate for a request: its load, the cached tokens, and whether it can start the
        request.

        ``is_late``: the request can no longer keep its objective.
        """
        limits, capacity = self._limits, survey.capacity
        num_known = num_held = 0
        if limits.prefix_cache:
            num_known, num_held = self.scheduler.known_prefix(entry.block_hashes(limits))
        num_tokens = entry.request.num_tokens if limits.page_attention else entry.sequence.max_cached_tokens
        num_ahead = capacity.num_ahead(is_late=is_late, has_run=entry.has_run)
        fits = capacity.fits(-(-num_tokens // limits.block_size) - num_held, num_ahead)
        is_open = fits and num_ahead < self._max_waiting
        if num_ahead:
            is_open = is_open and survey.num_waiting_tokens < self._max_waiting_tokens
        return Candidate(self.index, survey.load, num_known * limits.block_size, fits, is_open)


@dataclass(slots=True, eq=False)
class Trip:
    """A transfer of a request's blocks to the pool of the replica that will decode the request."""

    entry: Entry
    lease: Lease
    source: int
    """Index of the replica from whose pool the blocks are read."""
    target: RoutedReplica
    began: float
    is_void: bool = False
    """True if the target was lost after the transfer had begun. Its pool then has no copy."""


def _step_bounds(limits: SchedulerLimits) -> tuple[int, int]:
    """Returns the maximum number of requests that may wait at a replica, and their maximum total number of tokens.

    A replica may have as many waiting requests as its next step or batch can start.
    """
    if limits.batching is BatchingStrategy.NONE:
        return 1, limits.max_num_batched_tokens
    if limits.batching is not BatchingStrategy.CONTINUOUS:
        return limits.max_batch_size, limits.max_batch_size * limits.max_prompt_len
    if limits.policy is Policy.CHUNKED:
        return limits.max_num_seqs, limits.mixed_step_tokens
    if limits.policy is Policy.SLO:
        return limits.max_num_seqs, limits.max_num_batched_tokens
    return limits.prefill_batch_size, limits.max_num_batched_tokens
