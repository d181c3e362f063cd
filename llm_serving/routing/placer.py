"""Moves waiting requests from the router's queue to replicas that can start them.

Moves a request back to the queue if its replica cannot start it and another replica can.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llm_serving.routing.placement import Candidate, Placed, Role, Routing, choose
from llm_serving.routing.replica import Entry, RoutedReplica, Survey
from llm_serving.scheduler.figures import Capacity
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.telemetry.receipt import MAX_BLOCKERS, BlockReason
from llm_serving.waiting.intake import Intake

if TYPE_CHECKING:
    from llm_serving.routing.prefill_split import PrefillSplit

BALANCE_DIVISOR = 8
"""Two loads (in tokens) are in balance if their difference is at most the capacity of a replica's KV cache divided by
this number.
"""

MAX_GROUPS = 4096
"""Maximum number of request groups (samples of a prompt, beams of a search) whose replica is remembered."""

Ready = Callable[[], list[RoutedReplica]]
"""Type of a function that returns the ready replicas that may serve the requests of a queue."""

HandOver = Callable[[Entry, float], None]
"""Type of a function that gives a request, which has left the router's queue, to a replica that decodes. The second
argument is the time.
"""


class Placer:
    """Decides when the first request of a queue goes to a replica, and to which replica.

    ``intake`` has the queue. ``entries`` has all requests of the router by id. ``ready`` returns the replicas that may
    serve the queue. ``placed`` is the router's set of replicas that got requests after their last call of ``schedule``.
    """

    def __init__(
        self,
        replicas: Sequence[RoutedReplica],
        intake: Intake,
        entries: dict[str, Entry],
        routing: Routing,
        ready: Ready,
        placed: set[int],
        split: PrefillSplit | None = None,
    ) -> None:
        limits: SchedulerLimits = replicas[0].scheduler.limits
        self.placed = placed
        self.hand_over: HandOver | None = None
        """Takes a request that holds blocks of the hand-over pool. None if all replicas compute prompts and decode."""
        self._replicas = replicas
        self._intake = intake
        self._entries = entries
        self._routing = routing
        self._ready = ready
        self._split = split
        """Decides which prompts are computed at prefill replicas. None if all replicas compute prompts and decode."""
        self._balance_tokens = (limits.num_blocks - 1) * limits.block_size // BALANCE_DIVISOR
        self._groups: OrderedDict[str, RoutedReplica] = OrderedDict()
        self._next_index = 0
        self._with_new: set[int] = set()
        """Indices of the replicas that may have waiting requests that never ran. All others have none."""
        self._blocked: tuple[Entry, bool, list[RoutedReplica], list[Capacity]] | None = None
        """The last attempt in which no replica could start the first request: the request, whether the request was
        late, the ready replicas and their capacities. None before the first of these attempts.
        """

    def place(self, now: float) -> None:
        """Moves waiting requests, in order, to replicas that can start them.

        Stops when no replica can start the first request.
        """
        if not self._intake and not self._with_new:
            return  # the most frequent case, whose cost must not grow with the number of replicas
        live = self._ready()
        if not live:
            return
        if self._intake:
            self._recall_held_up(live, now)
            self._learn(live)
            self._place_all(live, now)
        elif self._recall_held_up(live, now):
            self._place_all(live, now)

    def recall(self, replica: RoutedReplica, entries: Sequence[Entry], now: float) -> None:
        """Moves requests that wait at a replica back to the router's queue."""
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

    def _place_all(self, live: list[RoutedReplica], now: float) -> None:
        surveys: dict[int, Survey] = {}
        while self._intake:
            entry = self._entries[self._intake.peek(now).request.request_id]
            if entry.lease is not None:
                assert self.hand_over is not None, "only the hand-over desk gives leases"
                self._leave_queue(entry, now)
                self.hand_over(entry, now)
                continue
            choice = self._replica_of_group(entry)
            if choice is None:
                if not surveys and self._is_still_blocked(entry, live):
                    return
                candidates, choice = self._choose_role(entry, live, surveys)
            if choice is None:
                self._note_blocked(entry, live, candidates, now)
                return
            replica, why = choice
            surveys.pop(replica.index, None)
            self._leave_queue(entry, now)
            self.bind(entry, replica, why, now)

    def _choose_role(
        self, entry: Entry, live: list[RoutedReplica], surveys: dict[int, Survey], *, may_probe: bool = True
    ) -> tuple[list[Candidate], tuple[RoutedReplica, Placed] | None]:
        """Returns the candidates for a request, and the chosen replica with the reason. The second value is None if no
        replica can start the request. With ``may_probe``, some prompts are handed over only to measure hand-overs.
        """
        split = self._split
        if split is None:
            candidates = self._candidates(entry, live, surveys)
            return candidates, self._choose(entry, candidates)
        candidates = self._candidates(entry, split.decoders(live), surveys)
        num_uncached = entry.request.num_tokens - max(one.cached_tokens for one in candidates)
        able = split.for_prompt(entry, num_uncached, live, may_probe=may_probe)
        if not able:
            return candidates, self._choose(entry, candidates)
        candidates = self._candidates(entry, able, surveys)
        if able[0].role is Role.PREFILL:
            # Long prompts may wait at a prefill replica, so that short prompts behind them in the router's queue can
            # start.
            candidates = [replace(one, fits=True, is_open=True) for one in candidates]
        choice = self._choose(entry, candidates)
        return candidates, None if choice is None else (choice[0], Placed.PROMPT)

    def _replica_of_group(self, entry: Entry) -> tuple[RoutedReplica, Placed] | None:
        """Returns the replica that got the last request of ``entry``'s request group (samples of a prompt or beams of a
        search).

        Returns None if the request has no group, if no request of the group has been placed, or if the replica is not
        ready.
        """
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
        return self._replicas[index], why

    def _leave_queue(self, entry: Entry, now: float) -> None:
        """Removes the first request from the router's queue."""
        if entry.is_paid and not entry.has_run:
            self._intake.remove(entry.sequence)
        else:
            self._intake.start(entry.sequence, now)
        self._intake.line.moved(now)
        entry.is_paid = True

    def bind(self, entry: Entry, replica: RoutedReplica, why: Placed, now: float) -> None:
        """Gives a request, which has left the router's queue, to a replica."""
        request = entry.request
        entry.replica = replica
        request.replica = replica.index
        replica.entries[request.request_id] = entry
        replica.num_placed[why] += 1
        self._next_index = (replica.index + 1) % len(self._replicas)
        if request.group:
            self._groups[request.group] = replica
            self._groups.move_to_end(request.group)
            if len(self._groups) > MAX_GROUPS:
                self._groups.popitem(last=False)
        self.placed.add(replica.index)
        self._with_new.add(replica.index)
        handed = entry.lease.blocks if entry.lease is not None else None
        hands_over = why is Placed.PROMPT and replica.role is Role.PREFILL
        index = entry.sequence.arrival_index
        replica.scheduler.place_request(request, index, now, hands_over=hands_over, handed=handed)

    def _recall_held_up(self, live: list[RoutedReplica], now: float) -> bool:
        """Moves requests back to the router's queue if their replica cannot start them and another replica can.

        Requests that have run or belong to a request group stay. Returns True if a request was moved.
        """
        recalled = False
        waiting = [index for index in sorted(self._with_new) if self._replicas[index].scheduler.num_waiting]
        self._with_new = set(waiting)
        for replica in [self._replicas[index] for index in waiting]:
            if not replica.is_live or live == [replica] or not replica.scheduler.capacity().is_held_up:
                continue
            stuck = [entry for entry in self._own(replica) if not entry.has_run and not entry.request.group]
            if stuck and self._has_better(stuck[0], replica, live):
                self.recall(replica, stuck, now)
                recalled = True
        return recalled

    def _own(self, replica: RoutedReplica) -> list[Entry]:
        """Returns the requests of ``replica`` that came from this queue. Others may come from the queue of a pool whose
        replicas are lost.
        """
        return [entry for key, entry in replica.entries.items() if key in self._intake.sequences]

    def _has_better(self, entry: Entry, replica: RoutedReplica, live: list[RoutedReplica]) -> bool:
        """Returns True if a request that ``replica`` cannot start now would go to another replica after a recall."""
        if self._split is None:
            others = [other for other in live if other is not replica]
            return self._choose(entry, self._candidates(entry, others, {})) is not None
        if replica.role is Role.PREFILL:
            return False  # long prompts may wait at a prefill replica
        # With roles, other replicas may have capacity, but not for this prompt. A recalled prompt would return here.
        _, choice = self._choose_role(entry, live, {}, may_probe=False)
        return choice is not None and choice[0] is not replica

    def _learn(self, live: list[RoutedReplica]) -> None:
        """Passes the learned prefill time of the fastest replica to the router's queue. Policy ``slo`` uses it to order
        requests.
        """
        known = [estimate for replica in live if any(estimate := replica.scheduler.prefill_estimate)]
        if known:
            self._intake.order.learn(*min(known))

    def _note_blocked(self, entry: Entry, live: list[RoutedReplica], candidates: list[Candidate], now: float) -> None:
        """Records why no replica can start the request: the steps are full, or batch rows or blocks are missing. The
        request's receipt (its list of times) shows this reason.
        """
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
        self._blocked = (entry, self._is_late(entry), live, capacities)

    def _is_still_blocked(self, entry: Entry, live: list[RoutedReplica]) -> bool:
        """Returns True if the same request is still first in the queue and no replica has gained capacity since the
        last attempt.

        ``place`` is called often, and returns early in this case.
        """
        if self._blocked is None or self._blocked[0] is not entry or self._blocked[1] != self._is_late(entry):
            return False
        _, _, before, capacities_before = self._blocked
        capacities = [replica.scheduler.capacity() for replica in live]
        return live == before and not any(map(Capacity.has_grown, capacities, capacities_before))
