"""The router: one queue in front of several schedulers, each with its own KV cache and agents (data parallelism).

Admission limits, deadlines, priorities, fairness between tenants and the order of policy ``slo`` hold for all replicas
together. A request waits in the router's queue until a replica can start it in its next step. ``Placer`` then chooses
the replica, by load and cached tokens. If the router chose the replica at the arrival of a request, requests could wait
at one replica while another replica is idle.

A request is in exactly one place: the router's queue or one scheduler. With separate prefill and decode on several
machines, it may also wait for a transfer of its blocks. A placed request moves back to the queue if its replica has no
capacity but another one has, or if the agents are lost. Requests that have run before are first in the queue, in order
of arrival. Their known tokens are computed again.

With ``pools`` (by prompt length), each pool has a queue with admission limits and an order of its own. So prompts that
wait for one pool do not delay prompts of another pool.

Samples of one prompt and beams of one search have the same ``group``. All requests of a group go to one replica, even
if they must wait there, because they share blocks through its prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from llm_serving.errors import AgentLostError, QueueFullError, RequestError
from llm_serving.request import FinishReason, Request
from llm_serving.routing.placement import Role, Routing
from llm_serving.routing.pools import PoolState, PoolStatus, PromptPools
from llm_serving.routing.queue import Queue
from llm_serving.routing.replica import Entry, RoutedReplica
from llm_serving.scheduler.figures import Figures
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult
from llm_serving.scheduler.scheduler import Scheduler

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
        pools: PromptPools | None = None,
    ) -> None:
        """``split`` assigns prompts to prefill replicas. None: every replica computes prompts and decodes.

        ``pools`` has the pools of the replicas. None: every replica serves prompts of any length. A router has a split
        or pools, but not both.
        """
        assert split is None or pools is None, "the config refuses roles with pools"
        self.limits: SchedulerLimits = schedulers[0].limits
        self.split = split
        roles = [Role.BOTH] * len(schedulers) if split is None else split.roles
        self.replicas = [RoutedReplica(index, *pair) for index, pair in enumerate(zip(schedulers, roles, strict=True))]
        self._pools = PromptPools.of_all(len(schedulers)) if pools is None else pools
        self._entries: dict[str, Entry] = {}
        self._placed: set[int] = set()
        """Indices of the replicas that got requests after their last call of ``schedule``."""
        self._queues = [
            Queue(self.replicas, self._entries, routing, ready, self._placed, split)
            for ready in (partial(self._pools.ready, number, self.replicas) for number in range(len(self._pools)))
        ]
        """The queue of each pool. Without pools, there is one queue."""
        self._closed: set[int] = set()
        """The pools whose requests no replica can serve, now or later."""
        self._num_arrivals = 0
        """Number of requests accepted since the start."""
        self._desk = None if split is None else self._made_desk(split)

    def _made_desk(self, split: PrefillSplit) -> HandOverDesk:
        """Creates the ``HandOverDesk``. Imports its module here, because only servers with separate prefill need it."""
        from llm_serving.routing.hand_over_desk import HandOverDesk

        [queue] = self._queues
        desk = HandOverDesk(split, self.replicas, self._entries, queue.intake, queue.placer)
        queue.placer.hand_over = desk.hand_over
        return desk

    def _queue_of(self, request: Request) -> Queue:
        return self._queues[self._pools.pool_of(request)]

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
        """Number of requests in the router's queues."""
        return sum(len(queue.intake) for queue in self._queues)

    def pool_statuses(self) -> list[PoolStatus]:
        """Returns the present state of each pool. Any thread may call this method."""
        waiting = [len(queue.intake) for queue in self._queues]
        statuses = self._pools.statuses(self.replicas, waiting, [queue.intake.sequences for queue in self._queues])
        return [status for status in statuses if status.name]

    def pool_states(self) -> dict[str, PoolState]:
        """Returns whether each pool is idle and ready. Empty without pools."""
        states = self._pools.states(self.replicas, [queue.intake.sequences for queue in self._queues])
        return {name: state for name, state in states.items() if name}

    # The following methods have the names of ``Scheduler``'s methods, whose docstrings describe them.

    def add_request(self, request: Request) -> None:
        pool = self._pools.pool_of(request)
        if pool in self._closed:
            raise AgentLostError(self._pools.loss_of(pool))
        if request.request_id in self._entries:
            raise RequestError(f"a request with the id {request.request_id!r} is being served", param="request_id")
        self._entries[request.request_id] = Entry(self._queues[pool].add(request, self._num_arrivals))
        self._num_arrivals += 1
        request.replica = None

    def queue_full(self, tenant: str = "", num_coming: int = 0) -> QueueFullError | None:
        """Returns an error only if the queues of all pools are full, because the length of the prompt is not known.

        With several pools, the requests that will be added before (``num_coming``) do not count. Their pools are not
        known, either.
        """
        num_coming = num_coming if len(self._queues) == 1 else 0
        full = [queue.intake.queue_full(queue.num_free_rows, tenant, num_coming) for queue in self._queues]
        return None if None in full else full[0]

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
        return [update for queue in self._queues for update in queue.intake.take_ended()]

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
        if unplaced != self.num_unplaced or unplaced + placed + travelling != len(self._entries):
            raise AssertionError(
                f"{len(self._entries)} requests: {self.num_unplaced} wait for a replica, {placed} have one, "
                f"{travelling} wait for a transfer"
            )
        if self._desk is not None:
            self._desk.check_integrity()
        known = sum(len(queue.intake.sequences) for queue in self._queues)
        at_home = [key in self._queue_of(one.request).intake.sequences for key, one in self._entries.items()]
        if known != len(self._entries) or not all(at_home):
            raise AssertionError(f"the intakes have {known} of {len(self._entries)} requests")

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
        self._recall(replica, [entry for entry in replica.entries.values() if not entry.has_run], now)

    def is_drained(self, index: int) -> bool:
        """Returns True if a replica has no requests, and no transfer reads or writes its hand-over pool."""
        replica = self.replicas[index]
        return not replica.entries and (self._desk is None or not self._desk.uses_pool_of(replica))

    def take_placed(self, now: float) -> list[int]:
        """Returns and forgets the indices of the replicas that got requests after their last ``schedule``.

        Before this, places the requests whose blocks have arrived from other machines or cannot arrive.
        """
        while self._desk is not None and self._desk.settle(now):
            self._place(now)
        placed = sorted(self._placed)
        self._placed.clear()
        return placed

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of a request in the router's queues."""
        deadlines = (queue.intake.next_deadline for queue in self._queues)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def expire(self, now: float) -> None:
        """Ends the requests in the router's queue whose deadline has passed. ``schedule`` also calls this method."""
        for queue in self._queues:
            for sequence in queue.intake.expire(now):
                del self._entries[sequence.request.request_id]
                sequence.request.end_tiles()

    def schedule(self, replica: RoutedReplica, now: float) -> ScheduledStep | None:
        """Places waiting requests at replicas that can start them, then returns the next step of ``replica``."""
        self.expire(now)
        self._place(now)
        self._placed.discard(replica.index)
        step = replica.scheduler.schedule(now)
        self._take_ended(replica)
        if self._desk is not None:
            self._take_hand_overs(replica, now)
            if step is not None:
                self._desk.add_headers(step)
        return step

    def next_wakeup(self, replica: RoutedReplica, now: float) -> float | None:
        """Returns the replica's next wakeup or the next deadline in the router's queue, whichever is earlier."""
        wakeup, deadline = replica.scheduler.next_wakeup(now), self.next_deadline
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
        self._recall(replica, list(replica.entries.values()), now)

    def give_up(self, index: int, now: float) -> None:
        """Records that the agents of a lost replica will not start again. Ends the requests that no replica can serve.
        """
        self.replicas[index].is_gone = True
        left = [replica for replica in self.replicas if not replica.is_gone]
        self._closed = {pool for pool in range(len(self._pools)) if not self._pools.able(pool, left)}
        for pool in self._closed:
            intake = self._queues[pool].intake
            for entry in [self._entries[request_id] for request_id in intake.sequences]:
                self._end_waiting(entry, FinishReason.ERROR, now)
                intake.note_ended([RequestUpdate(entry.request, error=self._pools.loss_of(pool))])

    def distrust_blocks(self, now: float, *, recompute: bool) -> None:
        """Drops all cached and handed blocks of all replicas, because one replica may have computed wrong values.

        Empties all prefix caches, because each of them may have blocks of that replica. The contents of all hand-overs
        count as damaged, so their requests are computed again. With ``recompute``, running requests whose blocks may
        come from other replicas are also computed again.
        """
        for each in self.replicas:
            each.scheduler.distrust_blocks(now, recompute=recompute)
            self._take_hand_overs(each, now)
            self._placed.add(each.index)  # requests may wait at this replica, and no other event may follow
        if self._desk is not None:
            self._desk.distrust()

    def _take_hand_overs(self, replica: RoutedReplica, now: float) -> None:
        """Processes the changes of hand-overs that a replica's scheduler has reported during the last call."""
        if self._desk is not None:
            self._desk.take(replica, now)

    def _place(self, now: float) -> None:
        for queue in self._queues:
            queue.placer.place(now)

    def _recall(self, replica: RoutedReplica, entries: Sequence[Entry], now: float) -> None:
        """Moves requests of a replica back to their queues."""
        for queue in self._queues:
            own = [entry for entry in entries if entry.request.request_id in queue.intake.sequences]
            queue.placer.recall(replica, own, now)

    # The following methods process requests that have ended, and forget them.

    def _take_ended(self, replica: RoutedReplica) -> None:
        """Processes the last updates of requests that the replica's scheduler has ended by itself, for example at their
        deadline.
        """
        ended = replica.scheduler.take_ended()
        if ended:
            self._note_updates(ended)
            self._queues[0].intake.note_ended(ended)  # ``take_ended`` returns the updates of all queues

    def _note_updates(self, updates: Sequence[RequestUpdate]) -> None:
        """Charges new tokens to the tenants of their requests, and removes requests that have ended."""
        if self.limits.fairness:
            for queue in self._queues:
                queue.charge_outputs(updates)
        for update in updates:
            if update.request.is_finished and not update.num_later:
                entry = self._entries.get(update.request.request_id)
                if entry is not None:
                    self._forget(entry)

    def _end_waiting(self, entry: Entry, reason: FinishReason, now: float) -> None:
        """Ends a request that is in the router's queue, or that waits for a transfer of its blocks."""
        del self._entries[entry.request.request_id]
        intake = self._queue_of(entry.request).intake
        if entry.trip is None:
            intake.remove(entry.sequence)
        if self._desk is not None:
            self._desk.free(entry)
        intake.end(entry.sequence, reason, now)
        entry.request.end_tiles()

    def _forget(self, entry: Entry) -> None:
        """Removes a request that was placed at a replica and has ended."""
        request_id = entry.request.request_id
        del self._entries[request_id], self._queue_of(entry.request).intake.sequences[request_id]
        if entry.replica is not None:
            del entry.replica.entries[request_id]
