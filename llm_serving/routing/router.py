"""One queue in front of several schedulers, each with its own KV cache and agents: data parallelism.

All guarantees of the queue hold for all replicas together: admission limits, deadlines, priorities, fairness between
tenants, and the order of policy ``slo``. A request waits here until a replica can start it. Then the replica has a
batch row and blocks for it, and the next step there can take it. ``placement`` then chooses the replica by load and
cached tokens. A router that places each request at its arrival cannot do this. Its requests could wait at one replica
while another is idle. The replica with the longest cached prefix may have a longer queue, but it must have the
capacity.

A request is in exactly one place: this queue or one scheduler. It comes back to this queue in two cases: only another
replica has capacity for it, or the agents of its replica are lost. Requests that have run go first, in order of
arrival, and are computed again from their known tokens.

A ``group`` is the samples of one prompt or the beams of a search. All its requests go to the replica of the first one,
even if they must wait there. With the prefix cache they share blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from llm_serving.errors import QueueFullError
from llm_serving.request import FinishReason, Request
from llm_serving.routing.placement import Candidate, Placed, Routing, choose
from llm_serving.routing.replica import Entry, RoutedReplica, Survey
from llm_serving.scheduler.figures import Capacity, Figures
from llm_serving.scheduler.intake import Intake
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.scheduler.slo_order import make_order
from llm_serving.telemetry.receipt import MAX_BLOCKERS, BlockReason

BALANCE_DIVISOR = 8
"""For the sake of a cached prefix, loads of replicas may differ by the tokens of a KV cache divided by this number."""

MAX_GROUPS = 4096
"""Maximum number of groups whose replica is known. The least recently used group is dropped."""


class Router:
    """A ``RequestFront`` for ``schedulers``, which are new and have equal limits."""

    def __init__(self, schedulers: Sequence[Scheduler], routing: Routing = Routing.PREFIX) -> None:
        self.limits: SchedulerLimits = schedulers[0].limits
        self.replicas = [RoutedReplica(index, scheduler) for index, scheduler in enumerate(schedulers)]
        self._routing = routing
        self._balance_tokens = (self.limits.num_blocks - 1) * self.limits.block_size // BALANCE_DIVISOR
        self._intake = Intake(self.limits, make_order(self.limits))
        self._entries: dict[str, Entry] = {}
        self._groups: OrderedDict[str, RoutedReplica] = OrderedDict()
        self._placed: set[int] = set()
        self._next_index = 0
        self._blocked: tuple[Entry, bool, list[Capacity]] | None = None
        """The first waiting request that no replica could start, whether it was late, and the replicas' capacities."""

    @property
    def is_idle(self) -> bool:
        return not self._entries and all(replica.scheduler.is_idle for replica in self.replicas)

    @property
    def figures(self) -> Figures:
        """The sums of the replicas' figures, including the requests in the router's queue."""
        own = Figures(waiting=self.num_unplaced)
        return sum((replica.scheduler.figures for replica in self.replicas), own)

    @property
    def num_unplaced(self) -> int:
        """Number of waiting requests that no replica has."""
        return len(self._intake)

    # Requests, see ``Scheduler``

    def add_request(self, request: Request) -> None:
        sequence = self._intake.add(request, self._num_free_rows())
        self._entries[request.request_id] = Entry(sequence)
        request.replica = None

    def queue_full(self) -> QueueFullError | None:
        return self._intake.queue_full(self._num_free_rows())

    def finish_request(self, request_id: str, reason: FinishReason, now: float) -> RequestUpdate | None:
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        if entry.replica is not None:
            update = entry.replica.scheduler.finish_request(request_id, reason, now)
            self._forget(entry)
            return update
        self._end_waiting(entry, reason, now)
        return RequestUpdate(entry.request)

    def abort_request(self, request_id: str, now: float) -> RequestUpdate | None:
        return self.finish_request(request_id, FinishReason.ABORT, now)

    def fail_all(self, error: str, now: float) -> list[RequestUpdate]:
        updates = []
        for entry in [entry for entry in self._entries.values() if entry.replica is None]:
            self._end_waiting(entry, FinishReason.ERROR, now)
            updates.append(RequestUpdate(entry.request, error=error))
        for replica in self.replicas:
            ended = replica.scheduler.fail_all(error, now)
            self._note_updates(ended)
            updates += ended
        return updates

    def take_ended(self) -> list[RequestUpdate]:
        return self._intake.take_ended()

    def check_integrity(self) -> None:
        """Raises AssertionError unless each request is in exactly one place and each scheduler passes its check."""
        for replica in self.replicas:
            replica.scheduler.check_integrity()
            if replica.scheduler.num_requests != len(replica.entries):
                raise AssertionError(
                    f"replica {replica.index} has {replica.scheduler.num_requests} requests,"
                    f" {len(replica.entries)} were placed there"
                )
            if any(entry.replica is not replica for entry in replica.entries.values()):
                raise AssertionError(f"a request of replica {replica.index} has another replica in its entry")
        unplaced = sum(entry.replica is None for entry in self._entries.values())
        placed = sum(len(replica.entries) for replica in self.replicas)
        if unplaced != len(self._intake) or unplaced + placed != len(self._entries):
            raise AssertionError(
                f"{len(self._entries)} requests: {len(self._intake)} wait for a replica, {placed} have one"
            )
        if self._entries.keys() != self._intake.sequences.keys():
            raise AssertionError(f"the intake has {len(self._intake.sequences)} of {len(self._entries)} requests")

    # Steps of a replica

    def agent_ready(self, index: int) -> None:
        """Notes that the agents of a replica are ready."""
        self.replicas[index].is_live = True

    def take_placed(self) -> list[int]:
        """Returns the replicas that got requests since the last call of their ``schedule``."""
        placed, self._placed = sorted(self._placed), set()
        return placed

    def schedule(self, replica: RoutedReplica, now: float) -> ScheduledStep | None:
        """Places waiting requests, and returns the next step of a replica."""
        self._place(now)
        self._placed.discard(replica.index)
        step = replica.scheduler.schedule(now)
        ended = replica.scheduler.take_ended()
        if ended:
            self._note_updates(ended)
            self._intake.note_ended(ended)
        return step

    def next_wakeup(self, replica: RoutedReplica, now: float) -> float | None:
        """Returns the replica's next wakeup or the next deadline in the router's queue, whichever is earlier."""
        wakeup, deadline = replica.scheduler.next_wakeup(now), self._intake.next_deadline
        if deadline is None:
            return wakeup
        return max(deadline, now) if wakeup is None else min(wakeup, max(deadline, now))

    def update(self, replica: RoutedReplica, result: StepResult, now: float) -> list[RequestUpdate]:
        """Passes a result to a replica."""
        updates = replica.scheduler.update(result, now)
        self._note_updates(updates)
        return updates

    def agent_lost(self, replica: RoutedReplica, now: float) -> None:
        """Takes the requests of a replica back. Other replicas may serve them."""
        replica.scheduler.agent_lost(now)
        replica.is_live = False
        self._recall(replica, list(replica.entries.values()), now)

    # Placement

    def _place(self, now: float) -> None:
        """Gives waiting requests in order to replicas that can start them, until the first one fits no replica."""
        for sequence in self._intake.expire(now):
            del self._entries[sequence.request.request_id]
        live = [replica for replica in self.replicas if replica.is_live]
        if not live:
            return
        if self._intake:
            self._recall_held_up(live, now)
            self._learn(live)
            self._place_all(live, now)
        elif len(live) > 1 and any(one.scheduler.num_waiting for one in live) and self._recall_held_up(live, now):
            self._place_all(live, now)

    def _place_all(self, live: list[RoutedReplica], now: float) -> None:
        surveys: dict[int, Survey] = {}
        while self._intake:
            entry = self._entries[self._intake.peek(now).request.request_id]
            choice = self._replica_of_group(entry)
            if choice is None:
                if not surveys and self._is_still_blocked(entry, live):
                    return
                candidates = self._candidates(entry, live, surveys)
                choice = self._choose(entry, candidates)
            if choice is None:
                self._note_blocked(entry, live, candidates, now)
                return
            replica, why = choice
            surveys.pop(replica.index, None)
            self._bind(entry, replica, why, now)

    def _replica_of_group(self, entry: Entry) -> tuple[RoutedReplica, Placed] | None:
        """Returns the replica of the group's other requests."""
        replica = self._groups.get(entry.request.group)
        return None if replica is None or not replica.is_live else (replica, Placed.GROUP)

    def _candidates(self, entry: Entry, live: list[RoutedReplica], surveys: dict[int, Survey]) -> list[Candidate]:
        is_late = self._is_late(entry)
        for replica in live:
            if replica.index not in surveys:
                surveys[replica.index] = replica.survey()
        return [replica.candidate(entry, surveys[replica.index], is_late=is_late) for replica in live]

    def _is_late(self, entry: Entry) -> bool:
        return not entry.has_run and self._intake.order.is_late(entry.sequence)

    def _choose(self, entry: Entry, candidates: list[Candidate]) -> tuple[RoutedReplica, Placed] | None:
        choice = choose(candidates, self._routing, self._balance_tokens, self._next_index)
        if choice is None:
            return None
        index, why = choice
        entry.cached_tokens = next(one.cached_tokens for one in candidates if one.index == index)
        return self.replicas[index], why

    def _bind(self, entry: Entry, replica: RoutedReplica, why: Placed, now: float) -> None:
        """Moves the first waiting request to a replica."""
        request = entry.request
        if entry.is_paid and not entry.has_run:
            self._intake.remove(entry.sequence)
        else:
            self._intake.start(entry.sequence, now)
        self._intake.line.moved(now)
        entry.is_paid = True
        entry.replica = replica
        request.replica = replica.index
        replica.entries[request.request_id] = entry
        replica.num_placed[why] += 1
        self._next_index = (replica.index + 1) % len(self.replicas)
        if request.group:
            self._groups[request.group] = replica
            self._groups.move_to_end(request.group)
            if len(self._groups) > MAX_GROUPS:
                self._groups.popitem(last=False)
        self._placed.add(replica.index)
        replica.scheduler.place_request(request, entry.sequence.arrival_index, now)

    def _recall(self, replica: RoutedReplica, entries: Sequence[Entry], now: float) -> None:
        """Takes requests that wait at a replica back to the router's queue."""
        if not entries:
            return
        replica.scheduler.release_requests([entry.request.request_id for entry in entries])
        replica.num_recalled += len(entries)
        for entry in entries:
            del replica.entries[entry.request.request_id]
            entry.replica, entry.hashes, entry.cached_tokens = None, None, 0
            if entry.has_run:
                self._intake.put_back(entry.sequence)
            else:
                self._intake.enqueue(entry.sequence, now)

    def _recall_held_up(self, live: list[RoutedReplica], now: float) -> bool:
        """Takes back requests that never ran and cannot start at their replica, if another replica can start them.

        Requests of a group stay together.
        """
        recalled = False
        for replica in live:
            if not replica.scheduler.num_waiting or not replica.scheduler.capacity().is_held_up:
                continue
            stuck = [entry for entry in replica.entries.values() if not entry.has_run and not entry.request.group]
            others = [other for other in live if other is not replica]
            if stuck and self._choose(stuck[0], self._candidates(stuck[0], others, {})) is not None:
                self._recall(replica, stuck, now)
                recalled = True
        return recalled

    def _learn(self, live: list[RoutedReplica]) -> None:
        """Passes the prefill time of the fastest replica to the order of the queue."""
        known = [estimate for replica in live if any(estimate := replica.scheduler.prefill_estimate)]
        if known:
            self._intake.order.learn(*min(known))

    def _note_blocked(self, entry: Entry, live: list[RoutedReplica], candidates: list[Candidate], now: float) -> None:
        """Notes why no replica can start the first waiting request: full steps, no batch rows, or else no blocks."""
        capacities = [replica.scheduler.capacity() for replica in live]
        reason = BlockReason.BLOCKS
        if any(one.fits for one in candidates):
            reason = BlockReason.BATCH
        elif all(one.num_free_rows <= one.num_all for one in capacities):
            reason = BlockReason.ROWS
        if reason is not BlockReason.BATCH:
            self._intake.limit_starts(0)
        by = [request_id for replica in live for request_id in list(replica.entries)[:MAX_BLOCKERS]][:MAX_BLOCKERS]
        entry.request.receipt.blocked(reason, by, now)
        self._intake.line.blocked(reason, by, now)
        self._blocked = (entry, self._is_late(entry), capacities)

    def _is_still_blocked(self, entry: Entry, live: list[RoutedReplica]) -> bool:
        """Returns True if the same request is still first and no replica's capacity has grown.

        This avoids most placements, because the engine asks for steps often.
        """
        if self._blocked is None or self._blocked[0] is not entry or self._blocked[1] != self._is_late(entry):
            return False
        capacities = [replica.scheduler.capacity() for replica in live]
        before = self._blocked[2]
        return len(capacities) == len(before) and not any(map(Capacity.has_grown, capacities, before))

    # Ends

    def _note_updates(self, updates: Iterable[RequestUpdate]) -> None:
        """Charges new tokens to their tenants, and forgets requests that have ended."""
        pays = self.limits.fairness and self._intake.has_tenants
        for update in updates:
            entry = self._entries.get(update.request.request_id)
            if entry is None:
                continue
            if pays and update.token_id is not None:
                self._intake.order.charge_output(entry.sequence, 1)
            if update.request.is_finished:
                self._forget(entry)

    def _end_waiting(self, entry: Entry, reason: FinishReason, now: float) -> None:
        """Ends a request in the router's queue."""
        del self._entries[entry.request.request_id]
        self._intake.remove(entry.sequence)
        self._intake.end(entry.sequence, reason, now)

    def _forget(self, entry: Entry) -> None:
        """Forgets a placed request that has ended."""
        request_id = entry.request.request_id
        del self._entries[request_id], self._intake.sequences[request_id]
        if entry.replica is not None:
            del entry.replica.entries[request_id]

    def _num_free_rows(self) -> int:
        """Returns the free batch rows of live replicas, less the requests that wait there. It may be negative."""
        capacities = [replica.scheduler.capacity() for replica in self.replicas if replica.is_live]
        return sum(one.num_startable - one.num_waiting - one.num_late for one in capacities)
