"""The router: one queue in front of several schedulers, each with its own KV cache and agents (data parallelism).

Admission limits, deadlines, priorities, fairness between tenants and the order of policy ``slo`` hold for all replicas
together. A request waits in the router's queue until a replica can start it in its next step. ``Placer`` then chooses
the replica, by load and cached tokens. If the router chose the replica at the arrival of a request, requests could wait
at one replica while another replica is idle.

A request is in exactly one place: the router's queue or one scheduler. With separate prefill and decode on several
machines, it may also wait for a transfer of its blocks. A placed request moves back to the queue if its replica has no
capacity but another one has, or if the agents are lost. Requests that have run before are first in the queue, in order
of arrival. Their known tokens are computed again.

Samples of one prompt and beams of one search have the same ``group``. All requests of a group go to one replica, even
if they must wait there, because they share blocks through its prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from llm_serving.errors import QueueFullError
from llm_serving.request import FinishReason, Request
from llm_serving.routing.placement import Role, Routing
from llm_serving.routing.placer import Placer
from llm_serving.routing.replica import Entry, RoutedReplica
from llm_serving.scheduler.figures import Figures
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.waiting.intake import Intake
from llm_serving.waiting.slo_order import make_order

if TYPE_CHECKING:
    from llm_serving.routing.hand_over_desk import HandOverDesk
    from llm_serving.routing.prefill_split import PrefillSplit


class Router:
    """The router for several ``schedulers``, which must be new and have equal limits."""

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        routing: Routing = Routing.PREFIX,
        split: PrefillSplit | None = None,
    ) -> None:
        """``split`` assigns prompts to prefill replicas. None: every replica computes prompts and decodes."""
        self.limits: SchedulerLimits = schedulers[0].limits
        self.split = split
        roles = [Role.BOTH] * len(schedulers) if split is None else split.roles
        self.replicas = [RoutedReplica(index, *pair) for index, pair in enumerate(zip(schedulers, roles, strict=True))]
        self._intake = Intake(self.limits, make_order(self.limits))
        self._entries: dict[str, Entry] = {}
        self._placer = Placer(self.replicas, self._intake, self._entries, routing, split)
        self._desk = None if split is None else self._made_desk(split)

    def _made_desk(self, split: PrefillSplit) -> HandOverDesk:
        """Creates the ``HandOverDesk``. Imports its module here, because only servers with separate prefill need it."""
        from llm_serving.routing.hand_over_desk import HandOverDesk

        desk = HandOverDesk(split, self.replicas, self._entries, self._intake, self._placer)
        self._placer.hand_over = desk.hand_over
        return desk

    @property
    def is_idle(self) -> bool:
        return not self._entries and all(replica.scheduler.is_idle for replica in self.replicas)

    @property
    def figures(self) -> Figures:
        """The sums of the replicas' figures. The waiting requests include those in the router's queue, and those that
        wait for a transfer of their blocks.
        """
        own = Figures(waiting=self.num_unplaced + (0 if self._desk is None else self._desk.num_travelling))
        return sum((replica.scheduler.figures for replica in self.replicas), own)

    @property
    def num_unplaced(self) -> int:
        """Number of requests in the router's queue."""
        return len(self._intake)

    # The following methods have the names of ``Scheduler``'s methods, whose docstrings describe them.

    def add_request(self, request: Request) -> None:
        sequence = self._intake.add(request, self._num_free_rows())
        self._entries[request.request_id] = Entry(sequence)
        request.replica = None

    def queue_full(self, tenant: str = "") -> QueueFullError | None:
        return self._intake.queue_full(self._num_free_rows(), tenant)

    def finish_request(self, request_id: str, reason: FinishReason, now: float) -> RequestUpdate | None:
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        if entry.replica is not None:
            replica = entry.replica
            update = replica.scheduler.finish_request(request_id, reason, now)
            self._forget(entry)
            self._take_hand_overs(replica, now)
            return update
        self._end_waiting(entry, reason, now)
        return RequestUpdate(entry.request)

    def fail_all(self, error: str, now: float) -> list[RequestUpdate]:
        updates = []
        for entry in [entry for entry in self._entries.values() if entry.replica is None]:
            self._end_waiting(entry, FinishReason.ERROR, now)
            updates.append(RequestUpdate(entry.request, error=error))
        for replica in self.replicas:
            ended = replica.scheduler.fail_all(error, now)
            self._note_updates(ended)
            self._take_hand_overs(replica, now)
            updates += ended
        return updates

    def take_ended(self) -> list[RequestUpdate]:
        return self._intake.take_ended()

    def check_integrity(self) -> None:
        """Raises AssertionError unless each request is in exactly one place and each scheduler passes its own integrity
        check.
        """
        for replica in self.replicas:
            replica.scheduler.check_integrity()
            if replica.scheduler.num_requests != len(replica.entries):
                raise AssertionError(
                    f"replica {replica.index} has {replica.scheduler.num_requests} requests,"
                    f" {len(replica.entries)} were placed there"
                )
            if any(entry.replica is not replica for entry in replica.entries.values()):
                raise AssertionError(f"a request of replica {replica.index} has another replica in its entry")
        unplaced = sum(entry.replica is None and entry.trip is None for entry in self._entries.values())
        placed = sum(len(replica.entries) for replica in self.replicas)
        travelling = 0 if self._desk is None else self._desk.num_travelling
        if unplaced != len(self._intake) or unplaced + placed + travelling != len(self._entries):
            raise AssertionError(
                f"{len(self._entries)} requests: {len(self._intake)} wait for a replica, {placed} have one, "
                f"{travelling} wait for a transfer"
            )
        if self._desk is not None:
            self._desk.check_integrity()
        if self._entries.keys() != self._intake.sequences.keys():
            raise AssertionError(f"the intake has {len(self._intake.sequences)} of {len(self._entries)} requests")

    # The following methods concern the steps of one replica.

    def agent_ready(self, index: int) -> None:
        """Records that the agents of a replica are ready."""
        self.replicas[index].is_live = True

    def drain(self, index: int, now: float) -> None:
        """Stops giving requests to a replica. Its running requests continue there. Its waiting requests move to the
        router's queue.
        """
        replica = self.replicas[index]
        replica.is_live = False
        waiting = [entry for entry in replica.entries.values() if not entry.has_run]
        self._placer.recall(replica, waiting, now)

    def is_drained(self, index: int) -> bool:
        """Returns True if a replica has no requests, and no transfer reads or writes its hand-over pool."""
        replica = self.replicas[index]
        return not replica.entries and (self._desk is None or not self._desk.uses_pool_of(replica))

    def take_placed(self, now: float) -> list[int]:
        """Returns and forgets the indices of the replicas that got requests after their last ``schedule``.

        Before this, places the requests whose blocks have arrived from other machines or cannot arrive.
        """
        while self._desk is not None and self._desk.settle(now):
            self._placer.place(now)
        placed = sorted(self._placer.placed)
        self._placer.placed.clear()
        return placed

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of a request in the router's queue."""
        return self._intake.next_deadline

    def expire(self, now: float) -> None:
        """Ends the requests in the router's queue whose deadline has passed. ``schedule`` also calls this method."""
        for sequence in self._intake.expire(now):
            del self._entries[sequence.request.request_id]
            sequence.request.end_tiles()

    def schedule(self, replica: RoutedReplica, now: float) -> ScheduledStep | None:
        """Places waiting requests at replicas that can start them, then returns the next step of ``replica``."""
        self.expire(now)
        self._placer.place(now)
        self._placer.placed.discard(replica.index)
        step = replica.scheduler.schedule(now)
        self._take_ended(replica)
        if self._desk is not None:
            self._take_hand_overs(replica, now)
            if step is not None:
                self._desk.add_headers(step)
        return step

    def next_wakeup(self, replica: RoutedReplica, now: float) -> float | None:
        """Returns the replica's next wakeup or the next deadline in the router's queue, whichever is earlier."""
        wakeup, deadline = replica.scheduler.next_wakeup(now), self._intake.next_deadline
        if deadline is None:
            return wakeup
        return max(deadline, now) if wakeup is None else min(wakeup, max(deadline, now))

    def update(self, replica: RoutedReplica, result: StepResult, now: float) -> list[RequestUpdate]:
        """Passes the result of a step to the replica's scheduler, and returns the updates of its requests."""
        updates = replica.scheduler.update(result, now)
        self._note_updates(updates)
        self._take_hand_overs(replica, now)
        return updates

    def agent_lost(self, replica: RoutedReplica, now: float, *, blameless: bool = False) -> None:
        """Moves the requests of a replica whose agents are lost back to the router's queue, for other replicas.

        ``blameless`` means that no request caused the loss.
        """
        replica.scheduler.agent_lost(now, blameless=blameless)
        replica.is_live = False
        self._take_ended(replica)
        if self._desk is not None:
            self._desk.lose(replica, now)
        self._placer.recall(replica, list(replica.entries.values()), now)

    def distrust_blocks(self, now: float, *, recompute: bool) -> None:
        """Drops all cached and handed blocks of all replicas, because one replica may have computed wrong values.

        Empties all prefix caches, because each of them may have blocks of that replica. The contents of all hand-overs
        count as damaged, so their requests are computed again. With ``recompute``, running requests whose blocks may
        come from other replicas are also computed again.
        """
        for each in self.replicas:
            each.scheduler.distrust_blocks(now, recompute=recompute)
            self._take_hand_overs(each, now)
            self._placer.placed.add(each.index)  # requests may wait at this replica, and no other event may follow
        if self._desk is not None:
            self._desk.distrust()

    def _take_hand_overs(self, replica: RoutedReplica, now: float) -> None:
        """Processes the changes of hand-overs that a replica's scheduler has reported during the last call."""
        if self._desk is not None:
            self._desk.take(replica, now)

    # The following methods process requests that have ended, and forget them.

    def _take_ended(self, replica: RoutedReplica) -> None:
        """Processes the last updates of requests that the replica's scheduler has ended by itself, for example at their
        deadline.
        """
        ended = replica.scheduler.take_ended()
        if ended:
            self._note_updates(ended)
            self._intake.note_ended(ended)

    def _note_updates(self, updates: Iterable[RequestUpdate]) -> None:
        """Charges new tokens to the tenants of their requests, and removes requests that have ended."""
        if self.limits.fairness and self._intake.has_tenants:
            known = (each for each in updates if each.request.request_id in self._entries)
            self._intake.order.charge_outputs(each.request for each in known if each.token_id is not None)
        for update in updates:
            if update.request.is_finished and not update.num_later:
                entry = self._entries.get(update.request.request_id)
                if entry is not None:
                    self._forget(entry)

    def _end_waiting(self, entry: Entry, reason: FinishReason, now: float) -> None:
        """Ends a request that is in the router's queue, or that waits for a transfer of its blocks."""
        del self._entries[entry.request.request_id]
        if entry.trip is None:
            self._intake.remove(entry.sequence)
        if self._desk is not None:
            self._desk.free(entry)
        self._intake.end(entry.sequence, reason, now)
        entry.request.end_tiles()

    def _forget(self, entry: Entry) -> None:
        """Removes a request that was placed at a replica and has ended."""
        request_id = entry.request.request_id
        del self._entries[request_id], self._intake.sequences[request_id]
        if entry.replica is not None:
            del entry.replica.entries[request_id]

    def _num_free_rows(self) -> int:
        """Returns the number of free batch rows of ready replicas, minus the requests that wait at these replicas.

        The result may be negative.
        """
        return sum(replica.scheduler.num_spare_rows for replica in self.replicas if replica.is_live)
