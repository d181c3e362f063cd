"""Drives a Router over several schedulers, each with a FakeDevice, in random order. Checks every operation.

The class has the same operations as ``simulation.Simulation``. The seed determines which replica's device runs a step,
returns a result or dies.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from llm_serving.kvstore.store import BlockStore
from llm_serving.request import Request
from llm_serving.routing.placement import Routing
from llm_serving.routing.pools import PromptPools
from llm_serving.routing.prefill_split import PrefillSplit
from llm_serving.routing.router import Router
from llm_serving.routing.sources import ReplicaSource, replica_sources
from llm_serving.scheduler.lifecycle import _has_foreign_blocks
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepReason, StepResult
from llm_serving.scheduler.scheduler import Scheduler
from support.cache_check import check_cache
from support.fakes import FakeDevice
from support.handed_memory import HandedMemory
from support.salt_watch import SaltWatch
from support.scheduler_scripts import Operation, Player, Script, make_script_limits
from support.simulated_clients import SimulatedClients
from support.tcp_pools import TcpPools
from support.tiered_simulation import DevicePool

__all__ = ["RoutedPlayer", "RoutedSimulation", "play_routed"]


class FakeReplica:
    """A scheduler behind the router, its device, and the device's results that have not arrived yet."""

    def __init__(
        self,
        source: ReplicaSource,
        inner: Scheduler,
        limits: SchedulerLimits,
        handed: HandedMemory | None,
        tier_hosts: int = 0,
    ) -> None:
        """``tier_hosts``: host blocks of the KV tiers. 0: no KV tiers."""
        self.scheduler = source
        self.inner = inner
        more = {} if handed is None else {"handed": handed}
        self.device = FakeDevice(limits, tier_hosts=tier_hosts, **more)
        self.store = BlockStore(limits.num_host_blocks, tier_hosts, None, lambda: None) if tier_hosts else None
        self.open_store()
        self.salt_watch = SaltWatch(limits.block_size, None if handed is None else handed.salts)
        self.answers: deque[StepResult] = deque()
        self.is_ready = True
        self.num_steps = 0

    def open_store(self) -> None:
        if self.store is not None:
            self.store.open(DevicePool(self.device))

    def next_step(self, now: float) -> ScheduledStep | None:
        """Returns the next step. Exchanges blocks with the KV tiers before, as ``engine.replica`` does."""
        store, source = self.store, self.scheduler
        if store is not None:
            store.exchange(source, now)
        step = source.schedule(now)
        if step is None and store is not None and store.exchange(source, now):
            step = source.schedule(now)
        return step

    @property
    def has_work(self) -> bool:
        return bool(self.answers or self.device.queue)


class RoutedSimulation(SimulatedClients):
    """Several replicas behind one router. If ``record`` is given, it wraps each scheduler with a flight recorder."""

    def __init__(
        self,
        limits: SchedulerLimits,
        num_replicas: int,
        seed: int = 0,
        routing: Routing = Routing.PREFIX,
        record: Callable[[Scheduler, int], Scheduler] | None = None,
        split: PrefillSplit | None = None,
        tier_hosts: int = 0,
        pools: PromptPools | None = None,
    ) -> None:
        """Makes the replicas and their router. If ``split`` is given, prefill and decode run on separate replicas."""
        self.split = split
        self.pools = split.pools if split is not None and isinstance(split.pools, TcpPools) else None
        """The pools of replicas on several machines. None if the replicas share a pool, or have no roles."""
        memory = None if split is None else HandedMemory(split.pool.num_blocks, limits.block_size, seed)
        memories = [memory] * num_replicas if self.pools is None else self.pools.memories
        schedulers = [Scheduler(limits) for _ in range(num_replicas)]
        self.inner = schedulers
        self.router = Router(
            schedulers if record is None else [record(one, index) for index, one in enumerate(schedulers)],
            routing,
            split,
            pools,
        )
        super().__init__(self.router)
        self.limits = limits
        self.replicas = [
            FakeReplica(source, inner, limits, handed, tier_hosts)
            for source, inner, handed in zip(replica_sources(self.router), schedulers, memories, strict=True)
        ]
        for index in range(num_replicas):
            self.router.agent_ready(index)
        self.rng = random.Random(seed)
        self.served_by: dict[str, set[int]] = {}
        """For each request, the replicas whose steps contained the request."""

    @property
    def memories(self) -> list[HandedMemory]:
        """The hand-over pools of the devices, without repetitions of a shared pool."""
        return list({id(replica.device.handed): replica.device.handed for replica in self.replicas}.values())

    def add(self, *requests: Request) -> None:
        super().add(*requests)
        self.served_by.update((request.request_id, set()) for request in requests)

    def schedule(self) -> int:
        """Schedules all possible steps, as the engine does. Returns their number.

        Checks that no replica is idle while a request waits. Also runs some of the waiting transfers between machines,
        and all of them if the devices have no work.
        """
        self._run_transfers()
        number = sum(self._schedule(index) for index in range(len(self.replicas)))
        while placed := self.router.take_placed(self.now):
            number += sum(self._schedule(index) for index in placed)
        self.take_ended()
        self._check_busy()
        self.check()
        return number

    def _run_transfers(self) -> None:
        while self.pools is not None and self.pools.has_waiting:
            if any(replica.has_work for replica in self.replicas) and self.rng.random() < 0.8:
                return
            self.pools.run()
            self.now += 0.0001

    def _schedule(self, index: int) -> int:
        replica, number = self.replicas[index], 0
        while replica.is_ready and (step := replica.next_step(self.now)) is not None:
            assert step.seq == replica.num_steps
            self.seen["loads from tiers"] += step.reason is StepReason.LOAD
            self.seen["stores to tiers"] += step.reason is StepReason.STORE
            replica.num_steps += 1
            replica.device.submit(step)
            replica.salt_watch.scheduled(step)
            for request in step.requests:
                assert request.replica == index
                self.served_by[request.request_id].add(index)
            number += 1
            assert number < 100, "there is always one more step"
        return number

    def _check_busy(self) -> None:
        """Checks that every ready replica that may serve a waiting request has work."""
        for queue in self.router._queues if self.split is None else ():
            for routed in queue._ready() if queue.intake else ():
                assert not self.inner[routed.index].is_idle, f"replica {routed.index} idles"

    def _some(self, condition: Callable[[FakeReplica], Any]) -> FakeReplica | None:
        able = [replica for replica in self.replicas if condition(replica)]
        return self.rng.choice(able) if able else None

    @property
    def has_queue(self) -> bool:
        return any(replica.device.queue for replica in self.replicas)

    @property
    def num_answers(self) -> int:
        return sum(len(replica.answers) for replica in self.replicas)

    def begin(self) -> None:
        if (replica := self._some(lambda one: one.device.queue)) is not None:
            replica.device.begin()

    def run(self, replica: FakeReplica | None = None) -> None:
        replica = replica or self._some(lambda one: one.device.queue)
        if replica is not None:
            result = replica.device.run_next()
            result.graph_us = 500 + 20 * len(result.sampled_ids) + 37 * result.seq % 300
            replica.answers.append(result)

    def answer(self) -> None:
        """Makes the oldest result of one replica arrive at its scheduler."""
        replica = self._some(lambda one: one.has_work)
        assert replica is not None
        if not replica.answers:
            self.run(replica)
        self.update(replica, replica.answers.popleft())

    def step_all(self) -> None:
        """Schedules steps, makes each device run one step, and makes all results arrive."""
        self.schedule()
        self.now += 0.001
        for replica in self.replicas:
            if not replica.answers and replica.device.queue:
                self.run(replica)
            if replica.answers:
                self.update(replica, replica.answers.popleft())

    def update(self, replica: FakeReplica, result: StepResult) -> list[RequestUpdate]:
        updates = replica.scheduler.update(result, self.now)
        replica.device.answered(result.seq)
        self.take(updates, result)
        self.check()
        return updates

    def finish(self, max_steps: int = 100_000) -> None:
        for index in range(len(self.replicas)):
            self.revive(index)
        for _ in range(max_steps):
            self.schedule()
            if any(replica.has_work for replica in self.replicas):
                self.answer()
                continue
            times = [replica.scheduler.next_wakeup(self.now) for replica in self.replicas]
            if not (due := [time for time in times if time is not None]):
                break
            assert min(due) > self.now
            self.now = min(due)
        assert self.router.is_idle, "the devices are idle while requests are waiting"
        self.check_quiet()

    def fail_step(self) -> None:
        if (replica := self._some(lambda one: one.device.queue)) is not None:
            updates = self.update(replica, StepResult(replica.device.fail_next(), error="it failed"))
            self.cut.update(update.request.request_id for update in updates)
            self.seen["failed steps"] += 1

    def drop_void_steps(self) -> None:
        for replica in self.replicas:
            for seq in replica.scheduler.void_steps():
                if (result := replica.device.abort(seq)) is not None:
                    replica.answers.append(result)

    def skip_step(self) -> None:
        if (replica := self._some(lambda one: one.device.queue)) is not None:
            result = replica.device.abort(max(slot.seq for slot in replica.device.queue))
            if result is not None:
                self.update(replica, result)

    def lose(self, index: int, *, blameless: bool = False) -> None:
        """Kills the agents of a replica. The replica is not ready until ``revive`` is called."""
        replica = self.replicas[index]
        self.seen["agents lost"] += 1
        self.seen["requests that lost their replica"] += len(self.router.replicas[index].entries)
        replica.device.reset()
        replica.answers.clear()
        if self.pools is not None:
            self.pools.lose(index)
            replica.device.handed = self.pools.memories[index]
        replica.scheduler.agent_lost(self.now, blameless=blameless)
        if replica.store is not None:
            replica.store.lose()
        replica.open_store()
        replica.is_ready = False
        inner = self.inner[index]
        assert (inner.figures.steps_in_flight, inner.num_requests) == (0, 0)
        assert inner.figures.free_blocks == inner.figures.total_blocks
        assert not inner.take_hand_overs()
        self.take_ended()
        self.check()

    def distrust(self, index: int, *, recompute: bool = False) -> None:
        """Lets the engine distrust all blocks that a replica has computed, as after logits that are not finite.

        With ``recompute``, as after a failed self-check. All blocks that must not be used any more then get random
        contents.
        """
        held = [(each, one) for each, inner in enumerate(self.inner) for one in inner._running.holders]
        foreign = [pair for pair in held if recompute and _has_foreign_blocks(pair[1])]
        tables = {id(one): list(one.block_table) for _, one in held}
        for replica in self.replicas:
            if replica.store is not None:
                replica.store.distrust()
        self.replicas[index].scheduler.distrust_blocks(self.now, recompute=recompute)
        for place, replica in enumerate(self.replicas):
            others = [one for each, one in held if each == place and (each, one) not in foreign]
            used = {block for one in others for block in tables[id(one)]}
            spoilt = {block for each, one in foreign if each == place for block in tables[id(one)]}
            replica.device.spoil_blocks(spoilt - used)
        self.seen["distrusted"] += 1
        self.seen["restarted"] += len(foreign)
        self.check()

    def revive(self, index: int) -> None:
        if not self.replicas[index].is_ready:
            self.replicas[index].is_ready = True
            self.router.agent_ready(index)

    def check(self) -> None:
        """Checks that every request is in exactly one place, and that every scheduler's invariants hold."""
        super().check()
        assert all(scheduler.num_waiting >= 0 for scheduler in self.inner)
        for scheduler in self.inner:
            capacity = scheduler.capacity()
            rows = capacity.num_startable - capacity.num_waiting - capacity.num_late
            assert scheduler.num_spare_rows == rows, "the cheap figure is the same as that of the capacity"
        with_new = [one for one in self.router.replicas if any(not entry.has_run for entry in one.entries.values())]
        waiting = {replica.index for replica in with_new if self.inner[replica.index].num_waiting}
        looked_at = set().union(*(queue.placer._with_new for queue in self.router._queues))
        assert waiting <= looked_at, "a replica with a new request that waits is looked at"
        assert len(self.requests) - len(self.ended) == len(self.router._entries)

    def check_quiet(self) -> None:
        figures = self.router.figures
        assert figures.free_blocks == figures.total_blocks
        for scheduler in self.inner:
            assert scheduler.is_idle
            assert len(scheduler._kv_cache.host_pool._free) == self.limits.num_host_blocks
            check_cache(scheduler._kv_cache)
        assert (figures.running, figures.waiting, figures.swapped) == (0, 0, 0)
        for replica in self.replicas:
            if (store := replica.store) is not None:
                while store.exchange(replica.scheduler, self.now):
                    pass
                assert not store._hosts._holds, "host blocks are held although nothing moves"
        if self.split is not None:
            assert self.split.pool.num_free == self.split.pool.num_blocks, "blocks of the hand-over pool have leaked"
        self.check_texts(self.limits.max_model_len)


class RoutedPlayer(Player):
    """Runs a script that was drawn for one scheduler on several replicas.

    If the script loses the agents, only one replica is lost, and it returns later.
    """

    def __init__(
        self,
        limits: dict[str, Any],
        num_replicas: int,
        seed: int,
        routing: Routing = Routing.PREFIX,
        pools: PromptPools | None = None,
    ) -> None:
        self.routed = RoutedSimulation(make_script_limits(limits), num_replicas, seed, routing, pools=pools)
        self.simulation: Any = self.routed

    def do(self, operation: Operation) -> None:
        for index in range(len(self.routed.replicas)):
            if self.routed.rng.random() < 0.1:
                self.routed.revive(index)
        super().do(operation)

    def begin(self) -> None:
        self.routed.begin()

    def answer(self, times: int) -> None:
        for _ in range(times):
            if self.routed.num_answers:
                self.routed.answer()

    def run(self, times: int) -> None:
        for _ in range(times):
            self.routed.run()

    def rounds(self, number: int) -> None:
        for _ in range(number):
            self.routed.schedule()
            while any(replica.has_work for replica in self.routed.replicas):
                self.routed.answer()

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.routed.schedule()
            if any(replica.has_work for replica in self.routed.replicas):
                self.routed.answer()

    def fail(self) -> None:
        self.routed.fail_step()

    def skip(self) -> None:
        self.routed.skip_step()

    def lose(self) -> None:
        self.routed.lose(self.routed.rng.randrange(len(self.routed.replicas)))


def play_routed(
    script: Script,
    num_replicas: int,
    seed: int,
    routing: Routing = Routing.PREFIX,
    pools: PromptPools | None = None,
) -> RoutedSimulation:
    """Runs a script until all its requests have ended. Raises AssertionError if a check fails."""
    player = RoutedPlayer(script.limits, num_replicas, seed, routing, pools)
    for operation in script.operations:
        player.do(operation)
    player.finish()
    return player.routed
