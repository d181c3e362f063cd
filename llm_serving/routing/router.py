"""One queue before several schedulers, each with a KV cache and agents of its own: data parallelism.

Every guarantee of the queue is one of the whole: its bounds and 429s, deadlines, priorities, the fair shares of API
keys, the order of policy ``slo``. A request is bound late: it waits here until a replica can start it, with a row and
blocks for it and no more requests waiting there than its next step takes. Then ``placement`` chooses where, by the
load and the caches of that moment. (Bound at its arrival, as by a router outside, it would wait behind whatever
happens to be before it in one replica, while another goes idle, and no priority or fairness could hold across.)
The replica that holds the most of its prompt may have a longer queue than that, but not one without room.

A request is in exactly one place: this queue, or one scheduler. It comes back here when its replica finds no room for
it after all while another has, and when its replica's agents are lost: those that ran go first, in order of arrival,
and are computed again from their known tokens, wherever there is room first.

Requests of a ``group`` (the samples of one prompt, the beams of a search) follow the first of them to its replica,
where they share its blocks; there they wait if they must.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from llm_serving.errors import QueueFullError, RequestError
from llm_serving.request import FinishReason, Request
from llm_serving.routing.figures import RouterFigures
from llm_serving.routing.placement import Candidate, Placed, Routing, choose
from llm_serving.routing.replica import Entry, ReplicaScheduler, Survey
from llm_serving.scheduler.figures import StartRoom
from llm_serving.scheduler.intake import RequestQueue
from llm_serving.scheduler.lifecycle import note_end, note_expiry
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import RequestUpdate
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.scheduler.sequence import Sequence as QueuedSequence
from llm_serving.scheduler.slo_order import SloOrder, make_order
from llm_serving.telemetry.receipt import MAX_BLOCKERS, BlockReason, WaitingLine

__all__ = ["BALANCE_SHARE", "MAX_GROUPS", "Router"]

BALANCE_SHARE = 8
"""Loads of replicas may differ by the tokens of so small a part of a KV cache for the sake of a prefix."""

MAX_GROUPS = 4096
"""Groups whose replica is known; the one that was used the longest ago is forgotten first."""


class Router:
    """A ``RequestFront``; ``replicas`` are the ``StepSource``s behind it, one for each of ``schedulers``, which are
    alike and new."""

    def __init__(self, schedulers: Sequence[Scheduler], routing: Routing = Routing.PREFIX) -> None:
        self.limits: SchedulerLimits = schedulers[0].limits
        self.replicas = [ReplicaScheduler(self, index, scheduler) for index, scheduler in enumerate(schedulers)]
        self._routing = routing
        self._balance_tokens = (self.limits.num_blocks - 1) * self.limits.block_size // BALANCE_SHARE
        self._order = make_order(self.limits)
        self._queue = RequestQueue(self.limits.max_waiting_requests, self.limits.max_waiting_tokens, self._order)
        self.figures = RouterFigures([replica.figures for replica in self.replicas], self._queue)
        self._line = WaitingLine()
        self._entries: dict[str, Entry] = {}
        self._groups: OrderedDict[str, ReplicaScheduler] = OrderedDict()
        self._placed: set[int] = set()
        self._ended: list[RequestUpdate] = []
        self._num_arrivals = 0
        self._turn = 0
        self._blocked: tuple[Entry, bool, list[StartRoom]] | None = None
        """The first in line that no replica could start, whether it was late, and how replicas stood."""

    @property
    def is_idle(self) -> bool:
        return not self._entries and all(replica.scheduler.is_idle for replica in self.replicas)

    # Requests; see ``Scheduler``

    def add_request(self, request: Request) -> None:
        if request.request_id in self._entries:
            raise RequestError(f"a request with the id {request.request_id!r} is being served", param="request_id")
        max_output_tokens = self.limits.max_output_tokens(request)
        self._queue.check_room(request.num_tokens, self._num_free_rows())
        entry = Entry(QueuedSequence(request, self._num_arrivals, max_output_tokens))
        self._num_arrivals += 1
        self._entries[request.request_id] = entry
        request.replica = None
        if not self._queue:
            self._line.moved(request.arrival_time)
        request.receipt.join(self._line)
        self._queue.append(entry.sequence)

    def queue_full(self) -> QueueFullError | None:
        try:
            self._queue.check_room(1, self._num_free_rows())
        except QueueFullError as error:
            return error.with_traceback(None)  # its frames know their callers, which will hold it: cycles
        return None

    def finish_request(self, request_id: str, reason: FinishReason, now: float) -> RequestUpdate | None:
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        self._forget(entry)
        if entry.replica is not None:
            return entry.replica.scheduler.finish_request(request_id, reason, now)
        self._queue.remove(entry.sequence)
        note_end(entry.request, reason, now)
        return RequestUpdate(entry.request)

    def abort_request(self, request_id: str, now: float) -> RequestUpdate | None:
        return self.finish_request(request_id, FinishReason.ABORT, now)

    def fail_all(self, error: str, now: float) -> list[RequestUpdate]:
        updates = []
        for entry in [entry for entry in self._entries.values() if entry.replica is None]:
            self._queue.remove(entry.sequence)
            note_end(entry.request, FinishReason.ERROR, now)
            updates.append(RequestUpdate(entry.request, error=error))
        for replica in self.replicas:
            replica.entries.clear()
            updates += replica.scheduler.fail_all(error, now)
        self._entries.clear()
        return updates

    def take_ended(self) -> list[RequestUpdate]:
        ended, self._ended = self._ended, []
        return ended

    def check_integrity(self) -> None:
        """Raises AssertionError unless every request is in exactly one place, and every scheduler is whole."""
        for replica in self.replicas:
            replica.scheduler.check_integrity()
            if replica.scheduler.num_requests != len(replica.entries):
                raise AssertionError(
                    f"replica {replica.index} has {replica.scheduler.num_requests} requests,"
                    f" {len(replica.entries)} were placed there"
                )
            if any(entry.replica is not replica for entry in replica.entries.values()):
                raise AssertionError(f"a request of replica {replica.index} is said to be elsewhere")
        unplaced = sum(entry.replica is None for entry in self._entries.values())
        placed = sum(len(replica.entries) for replica in self.replicas)
        if unplaced != len(self._queue) or unplaced + placed != len(self._entries):
            raise AssertionError(
                f"{len(self._entries)} requests: {len(self._queue)} wait for a replica, {placed} have one"
            )

    # What the replicas tell, and the engine

    def agent_ready(self, index: int) -> None:
        """A replica's agents are there: it serves."""
        self.replicas[index].is_live = True

    def take_placed(self) -> list[int]:
        """Replicas that were given requests since they were last asked for a step."""
        placed, self._placed = sorted(self._placed), set()
        return placed

    def asked(self, index: int) -> None:
        """A replica is asked for a step."""
        self._placed.discard(index)

    def next_wakeup(self, now: float) -> float | None:
        """When a request in the queue expires."""
        deadline = self._queue.next_deadline
        return None if deadline is None else max(deadline, now)

    def take_updates(self, updates: Iterable[RequestUpdate]) -> None:
        """Requests got tokens, or ended."""
        pays = self.limits.fairness and self._queue.has_tenants
        for update in updates:
            request = update.request
            if pays and update.token_id is not None:
                entry = self._entries.get(request.request_id)
                if entry is not None:
                    self._queue.charge_output(entry.sequence)
            if request.is_finished and request.request_id in self._entries:
                self._forget(self._entries[request.request_id])

    def take_expired(self, updates: list[RequestUpdate]) -> None:
        """A replica ended requests itself: their deadline has passed there."""
        if updates:
            self.take_updates(updates)
            self._ended += updates

    def recall(self, replica: ReplicaScheduler, entries: Sequence[Entry], now: float) -> None:
        """Requests that wait at a replica come back to the queue."""
        if not entries:
            return
        replica.scheduler.release_requests([entry.request.request_id for entry in entries])
        replica.num_recalled += len(entries)
        for entry in entries:
            request = entry.request
            del replica.entries[request.request_id]
            entry.replica, entry.hashes, entry.cached_tokens = None, None, 0
            if entry.has_run:
                self._queue.put_back(entry.sequence)
            else:
                request.receipt.join(self._line, now)
                self._queue.append(entry.sequence)

    def place(self, now: float) -> None:
        """Give requests to the replicas that can start them, the first in line first, as long as there is one."""
        self._end_expired(now)
        live = [replica for replica in self.replicas if replica.is_live]
        if not live:
            return
        if self._queue:
            self._recall_held_up(live, now)
            self._learn(live)
            self._place_all(live, now)
        elif len(live) > 1 and any(replica.figures.num_waiting for replica in live) and self._recall_held_up(live, now):
            self._place_all(live, now)

    def _place_all(self, live: list[ReplicaScheduler], now: float) -> None:
        surveys: dict[int, Survey] = {}
        while self._queue:
            entry = self._entries[self._queue.peek(now).request.request_id]
            choice = self._of_group(entry)
            if choice is None:
                if not surveys and self._is_blocked_still(entry, live):
                    return
                candidates = self._candidates(entry, live, surveys)
                choice = self._choose(entry, candidates)
            if choice is None:
                self._note_blocked(entry, live, candidates, now)
                return
            replica, why = choice
            surveys.pop(replica.index, None)
            self._bind(entry, replica, why, now)

    def _of_group(self, entry: Entry) -> tuple[ReplicaScheduler, Placed] | None:
        """Where the others of its group are, or were last."""
        replica = self._groups.get(entry.request.group)
        return None if replica is None or not replica.is_live else (replica, Placed.GROUP)

    def _candidates(self, entry: Entry, live: list[ReplicaScheduler], surveys: dict[int, Survey]) -> list[Candidate]:
        is_late = self._is_late(entry)
        for replica in live:
            if replica.index not in surveys:
                surveys[replica.index] = replica.survey()
        return [replica.candidate(entry, surveys[replica.index], is_late=is_late) for replica in live]

    def _is_late(self, entry: Entry) -> bool:
        return isinstance(self._order, SloOrder) and not entry.has_run and self._order.is_late(entry.sequence)

    def _choose(self, entry: Entry, candidates: list[Candidate]) -> tuple[ReplicaScheduler, Placed] | None:
        choice = choose(candidates, self._routing, self._balance_tokens, self._turn)
        if choice is None:
            return None
        index, why = choice
        entry.cached_tokens = next(one.cached_tokens for one in candidates if one.index == index)
        return self.replicas[index], why

    def _bind(self, entry: Entry, replica: ReplicaScheduler, why: Placed, now: float) -> None:
        request = entry.request
        if entry.is_paid and not entry.has_run:
            self._queue.remove(entry.sequence)
        else:
            self._queue.start(entry.sequence, now)
        self._line.moved(now)
        entry.is_paid = True
        entry.replica = replica
        request.replica = replica.index
        replica.entries[request.request_id] = entry
        replica.num_placed[why] += 1
        self._turn = (replica.index + 1) % len(self.replicas)
        if request.group:
            self._groups[request.group] = replica
            self._groups.move_to_end(request.group)
            if len(self._groups) > MAX_GROUPS:
                self._groups.popitem(last=False)
        self._placed.add(replica.index)
        replica.scheduler.place_request(request, entry.sequence.arrival_index, now)

    def _recall_held_up(self, live: list[ReplicaScheduler], now: float) -> bool:
        """Requests that never ran and cannot start where they are, while another replica could take them. Those of a
        group stay with it."""
        recalled = False
        for replica in live:
            if not replica.figures.num_waiting or not replica.scheduler.start_room().is_held_up:
                continue
            stuck = [entry for entry in replica.entries.values() if not entry.has_run and not entry.request.group]
            others = [other for other in live if other is not replica]
            if stuck and self._choose(stuck[0], self._candidates(stuck[0], others, {})) is not None:
                self.recall(replica, stuck, now)
                recalled = True
        return recalled

    def _learn(self, live: list[ReplicaScheduler]) -> None:
        """What a prefill takes, where the order depends on it: as it is at the fastest replica."""
        if isinstance(self._order, SloOrder):
            known = [estimate for replica in live if any(estimate := replica.scheduler.prefill_estimate)]
            if known:
                self._order.learn(*min(known))

    def _note_blocked(
        self, entry: Entry, live: list[ReplicaScheduler], candidates: list[Candidate], now: float
    ) -> None:
        """No replica can start the first in line: the steps are full, or there are no rows, or else no blocks."""
        rooms = [replica.scheduler.start_room() for replica in live]
        reason = BlockReason.BLOCKS
        if any(one.holds for one in candidates):
            reason = BlockReason.BATCH
        elif all(room.num_free_rows <= room.num_all for room in rooms):
            reason = BlockReason.ROWS
        if reason is not BlockReason.BATCH:
            self._queue.limit_starts(0)
        by = [request_id for replica in live for request_id in list(replica.entries)[:MAX_BLOCKERS]][:MAX_BLOCKERS]
        entry.request.receipt.blocked(reason, by, now)
        self._line.blocked(reason, by, now)
        self._blocked = (entry, self._is_late(entry), rooms)

    def _is_blocked_still(self, entry: Entry, live: list[ReplicaScheduler]) -> bool:
        """Whether it is still the same request that is first in line, and nothing has changed for the better: there
        is no need to look again. What asks for a step asks often, and mostly in vain."""
        if self._blocked is None or self._blocked[0] is not entry or self._blocked[1] != self._is_late(entry):
            return False
        rooms = [replica.scheduler.start_room() for replica in live]
        before = self._blocked[2]
        return len(rooms) == len(before) and not any(map(StartRoom.has_gained, rooms, before))

    def _end_expired(self, now: float) -> None:
        for sequence in self._queue.pop_expired(now):
            request = sequence.request
            self._forget(self._entries[request.request_id])
            note_end(request, FinishReason.ABORT, now)
            self._ended.append(note_expiry(request, now))

    def _forget(self, entry: Entry) -> None:
        """A request has ended."""
        del self._entries[entry.request.request_id]
        if entry.replica is not None:
            del entry.replica.entries[entry.request.request_id]

    def _num_free_rows(self) -> int:
        """Rows of the replicas that serve which nobody waits for there; negative when more wait than can start."""
        rooms = [replica.scheduler.start_room() for replica in self.replicas if replica.is_live]
        return sum(room.num_startable - room.num_waiting - room.num_late for room in rooms)
