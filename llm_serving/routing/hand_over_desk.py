"""Manages the hand-overs of computed prompts between the replicas of a router.

A prefill replica asks for blocks of the hand-over pool. Later it reports that these blocks have the content of the
prompt's blocks. The request then moves to the least loaded decode replica. If this replica is on another machine, the
blocks are first sent to the pool there. The blocks stay in the pools until the decode replica has loaded them. If this
replica is lost before, another decode replica can load them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from llm_serving.block_moves.hand_overs import Change, HandOverChange
from llm_serving.errors import LLMServingError
from llm_serving.handover.header import block_hashes
from llm_serving.handover.pool import Lease
from llm_serving.ipc.shm import MoveKind
from llm_serving.routing.placement import Placed, Role
from llm_serving.routing.placer import Placer
from llm_serving.routing.prefill_split import PrefillSplit
from llm_serving.routing.replica import Entry, RoutedReplica, Trip
from llm_serving.scheduler.output import ScheduledStep
from llm_serving.telemetry.receipt import Phase
from llm_serving.waiting.intake import Intake


class HandOverDesk:
    """Grants and frees the blocks of hand-overs, and moves the requests between replicas.

    Transfers between pools may end in any thread. ``settle`` processes their ends.
    """

    def __init__(
        self,
        split: PrefillSplit,
        replicas: Sequence[RoutedReplica],
        entries: dict[str, Entry],
        intake: Intake,
        placer: Placer,
    ) -> None:
        self._split = split
        self._pool = split.pool
        self._replicas = replicas
        self._entries = entries
        self._intake = intake
        self._placer = placer
        self._wanted: deque[tuple[Entry, RoutedReplica, float]] = deque()
        """Requests that wait for blocks of the pool. Each entry has the request, its prefill replica, and the time at
        which the replica asked for the blocks.
        """
        self._leases: dict[Lease, None] = {}
        self._trips: dict[Trip, None] = {}
        """The transfers that have not ended."""
        self._ended: deque[tuple[Trip, LLMServingError | None]] = deque()
        """The transfers that have ended and are not processed yet, each with its error or None."""
        self._has_put_back = False
        """True if a request went back to the router's queue after the last call of ``settle``."""

    @property
    def num_travelling(self) -> int:
        """Number of requests that wait for a transfer of their blocks."""
        return sum(trip.entry.trip is trip for trip in self._trips)

    def take(self, replica: RoutedReplica, now: float) -> None:
        """Processes the changes of hand-overs that a replica's scheduler reports."""
        for change in replica.scheduler.take_hand_overs():
            self._take(change, replica, now)
        self._take_ended(now)
        if self._wanted:
            self._grant_all()

    def settle(self, now: float) -> bool:
        """Processes the transfers that have ended, and grants the blocks that they free.

        Returns True if requests went back to the router's queue since the last call, because their blocks cannot
        arrive. The caller must then place these requests, because no other event may follow that would place them.
        """
        if self._ended:
            self._take_ended(now)
            self._grant_all()
        has_put_back, self._has_put_back = self._has_put_back, False
        return has_put_back

    def uses_pool_of(self, replica: RoutedReplica) -> bool:
        """Returns True if a transfer from or to the replica's pool has not ended."""
        return any(trip.source == replica.index or trip.target is replica for trip in self._trips)

    def _take_ended(self, now: float) -> None:
        """Processes the transfers that have ended: gives their requests to the replicas whose pools have the blocks
        now."""
        while self._ended:
            trip, error = self._ended.popleft()
            del self._trips[trip]
            lease, entry = trip.lease, trip.entry
            lease.num_trips -= 1
            if error is None and not trip.is_void:
                lease.holders.add(trip.target.index)
            if lease.is_dropped:
                self._free(lease)
            if entry.trip is not trip:
                continue  # the request has ended, or its blocks go to another replica
            entry.trip = None
            self._split.note_transfer(trip, now, failed=error is not None)
            if error is None:
                self.hand_over(entry, now)
            else:
                self._compute_again(entry, now)

    def lose(self, replica: RoutedReplica, now: float) -> None:
        """Processes the changes of hand-overs after a replica has lost its agents.

        A request that was about to load its blocks at this replica loads them at another replica, if a pool still has
        the blocks. But if the request may have killed the agents, it is computed again.
        """
        if not self._split.pools.is_shared:
            for lease in self._leases:
                lease.holders.discard(replica.index)
        for change in replica.scheduler.take_hand_overs():
            entry = self._entries.get(change.request_id)
            if entry is not None and _may_reload(entry, change):
                self._split.figures.reloads += 1
                continue
            self._take(change, replica, now)
        for trip in [trip for trip in self._trips if trip.target is replica and not trip.is_void]:
            trip.is_void = True
            if trip.entry.trip is trip:
                self._split.figures.reloads += 1
                trip.entry.trip = None
                self.hand_over(trip.entry, now)
        self._take_ended(now)
        self._split.threshold.note_lost(replica.index)
        self._wanted = deque(each for each in self._wanted if each[1] is not replica)
        self._grant_all()

    def distrust(self) -> None:
        """Renews the headers of all pool blocks, so that no replica accepts their present contents."""
        for lease in self._leases:
            self._pool.renew_headers(lease)

    def add_headers(self, step: ScheduledStep) -> None:
        """Adds to a step the header of each block that it moves to or from the hand-over pool."""
        if step.moves and step.moves[0].kind is MoveKind.HAND_OUT:
            step.headers = [self._pool.header(move.destination) for move in step.moves]
        elif step.moves and step.moves[0].kind is MoveKind.HAND_IN:
            step.headers = [self._pool.header(move.source) for move in step.moves]

    def free(self, entry: Entry) -> None:
        """Frees the blocks of a request that ended while it waited for a replica or for a transfer."""
        entry.trip = None
        if entry.lease is not None:
            self._free(entry.lease)
            entry.lease = None

    def hand_over(self, entry: Entry, now: float) -> None:
        """Gives a request, which must be in no queue, to the least loaded decode replica whose pool has its blocks.

        If no pool of a decode replica has the blocks, chooses the least loaded of all decode replicas. A transfer then
        sends the blocks to its pool, and the replica gets the request after the transfer.

        If no replica is ready, the request goes back to the queue. If all copies of the blocks are lost, the request is
        computed again.
        """
        live, lease = [one for one in self._replicas if one.is_live], entry.lease
        assert lease is not None
        if not lease.holders:
            self._compute_again(entry, now)
            return
        if not live:
            self._intake.put_back(entry.sequence)
            return
        near = [one for one in self._split.decoders(live) if one.index in lease.holders]
        target = self._split.least_loaded(near or live)
        if target.index in lease.holders:
            self._placer.bind(entry, target, Placed.HANDED, now)
            return
        source = min(lease.holders)
        trip = entry.trip = Trip(entry, lease, source, target, now)
        self._trips[trip] = None
        lease.num_trips += 1
        pairs = [(block, block) for block in lease.blocks]
        transport = self._split.pools.transport(source, target.index)
        transport.transfer(pairs, partial(self._note_ended, trip))

    def check_integrity(self) -> None:
        """Raises AssertionError unless the held blocks of the pool are those of the leases."""
        self._pool.check_integrity(list(self._leases))
        held = {entry.lease for entry in self._entries.values() if entry.lease is not None}
        if not held <= self._leases.keys():
            raise AssertionError("a request has blocks of the hand-over pool that are not leased")
        if any(entry.trip is not None and entry.replica is not None for entry in self._entries.values()):
            raise AssertionError("a request waits for a transfer and is at a replica")

    def _take(self, change: HandOverChange, replica: RoutedReplica, now: float) -> None:
        entry = self._entries.get(change.request_id)
        if change.kind is Change.WANTED:
            is_known = any(each[:2] == (entry, replica) for each in self._wanted)  # the prompt was computed twice
            if entry is not None and entry.replica is replica and not is_known:
                self._wanted.append((entry, replica, now))
            return
        lease = self._pool.lease_of(change.blocks)
        if change.kind is Change.READY:
            assert entry is not None
            lease.is_complete = True
            lease.holders.add(replica.index)
            del replica.entries[change.request_id]
            entry.replica, entry.hashes, entry.cached_tokens = None, None, 0
            if self._split.sends_tokens:
                entry.request.sampling = replace(entry.request.sampling, keeps_history=True)
            self.hand_over(entry, now)
            return
        self._note_end(change, lease, now)
        self._free(lease)
        if entry is not None and entry.lease is lease:
            entry.lease = None

    def _note_end(self, change: HandOverChange, lease: Lease, now: float) -> None:
        figures = self._split.figures
        if change.kind is Change.LOADED:
            latency = now - lease.asked_at
            figures.completed += 1
            figures.blocks += change.num_blocks
            figures.seconds += latency
            self._split.threshold.note(latency, change.num_blocks)
        elif change.kind is Change.MISSED:
            figures.misses += 1

    def _note_ended(self, trip: Trip, error: LLMServingError | None) -> None:
        """Records the end of a transfer. Any thread may call this method."""
        self._ended.append((trip, error))

    def _compute_again(self, entry: Entry, now: float) -> None:
        """Puts a request whose blocks cannot arrive back into the queue, and frees the blocks."""
        self.free(entry)
        entry.must_stay = True
        entry.request.num_computed_tokens = 0
        entry.request.receipt.enter(Phase.RESTARTED, now)
        self._intake.put_back(entry.sequence)
        self._has_put_back = True

    def _grant_all(self) -> None:
        """Grants blocks to the requests that wait for blocks, in order, until too few blocks are free."""
        while self._wanted:
            entry, replica, asked_at = self._wanted[0]
            request = entry.request
            if self._entries.get(request.request_id) is not entry or entry.replica is not replica:
                self._wanted.popleft()  # the request has ended or left the replica
                continue
            blocks: list[int] = []
            if any(one.is_live and one.role is not Role.PREFILL for one in self._replicas):
                lease = self._lease(entry, asked_at)
                if lease is None:
                    return
                entry.lease, blocks = lease, lease.blocks
            else:
                self._split.figures.refused += 1
            self._wanted.popleft()
            replica.scheduler.grant_hand_over(request.request_id, blocks)
            self._placer.placed.add(replica.index)

    def _lease(self, entry: Entry, asked_at: float) -> Lease | None:
        limits, request = self._replicas[0].scheduler.limits, entry.request
        tokens = entry.sequence.known_tokens(0, request.num_tokens - 1)
        hashes = block_hashes(tokens, limits.block_size, limits.cache_namespace, request.cache_salt)
        lease = self._pool.lease(hashes, asked_at)
        if lease is not None:
            self._leases[lease] = None
        return lease

    def _free(self, lease: Lease) -> None:
        """Frees the blocks of a lease, or marks them to be freed when no transfer uses them any more."""
        lease.is_dropped = lease.num_trips > 0
        if not lease.is_dropped:
            del self._leases[lease]
            self._pool.free(lease)


def _may_reload(entry: Entry, change: HandOverChange) -> bool:
    """Returns True if a request whose decode replica was lost may load its blocks at another replica.

    A pool must still have the blocks, and the request must not be a suspect (a request that may have killed an agent).
    """
    lease = entry.lease
    has_copy = lease is not None and lease.is_complete and lease.holders and lease.blocks == change.blocks
    return bool(has_copy) and not entry.request.is_suspect
