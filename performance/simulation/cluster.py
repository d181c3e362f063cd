"""Simulates a server whose replicas are on several nodes: links, losses of nodes, roles, KV tiers in host memory.

``VirtualServer`` checks every replica in each loop iteration. ``VirtualCluster`` keeps the replicas' next events in a
heap instead, so that it can simulate a thousand replicas. The time of the engine thread comes from ``HostModel``. With
``ClusterModel.measures``, calls of router and scheduler take their measured processor time instead.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from llm_serving.ipc.shm import NUM_SLOTS
from llm_serving.kvstore.store import BlockStore
from llm_serving.routing.placement import Routing
from llm_serving.routing.pools import PromptPools
from llm_serving.routing.prefill_split import PrefillSplit
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import ScheduledStep, StepKind
from performance.simulation.agent import VirtualAgent
from performance.simulation.device import CostModel
from performance.simulation.host import HostModel
from performance.simulation.roles import HandedBlocks
from performance.simulation.server import Outcome, VirtualServer
from performance.simulation.spread import Spread
from performance.simulation.workload import SimulatedRequest, Source

__all__ = ["ClusterModel", "ClusterOutcome", "Loss", "VirtualCluster"]

T = TypeVar("T")
STEP_BYTES, TOKEN_BYTES, ROW_BYTES, BLOCK_BYTES = 256, 8, 96, 4
"""Size of a step's message on a link, in bytes. STEP_BYTES is the fixed part. The other numbers are added for each
token, each sequence, and each entry of a block table.
"""


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a node, which stops at ``at_s`` virtual seconds. The node's agents are ready again
    ``ClusterModel.restart_s`` seconds after the server has noticed the loss.
    """

    node: int
    at_s: float


@dataclass(frozen=True, slots=True)
class ClusterModel:
    """The nodes of a simulated server, and their links. Replica ``i`` is on node ``i % num_nodes``."""

    num_nodes: int
    num_replicas: int
    latency_s: float = 100e-6
    """Seconds from sending a message to its arrival, in one direction. The transmission time of its bytes is added."""
    bytes_per_s: float = 1.25e9
    """Bandwidth of the link of each node, in each direction. The replicas of a node share it."""
    losses: tuple[Loss, ...] = ()
    notice_s: float = 2.4
    """Seconds until the server notices that a node has stopped. See ``SERVER_PATIENCE_S`` of
    ``llm_serving/cluster/messages.py``.
    """
    restart_s: float = 10.0
    tier_blocks: int = 0
    """Number of blocks that each replica's KV tier has in host memory. 0 means that there is no KV tier."""
    block_bytes: float = 0.0
    """Bytes of a block of the KV cache, for blocks that a replica hands to a replica on another node."""
    measures: bool = False
    """True if a call of router or scheduler takes as long in virtual time as the measured processor time of the call.

    False if all times of the engine thread come from ``HostModel``.
    """


REST = HostModel(result_s=22e-6, result_seq_s=1.0e-6, send_s=14e-6, send_seq_s=0.3e-6, request_s=5e-6)
"""The engine thread's times without those of router and scheduler, measured by ``performance/bench_engine_host.py``.

Used if the times of router and scheduler are measured (``ClusterModel.measures``).
"""


@dataclass(slots=True)
class ClusterOutcome(Outcome):
    """The result of a simulated run on several nodes: an ``Outcome`` with figures of engine thread, links and nodes."""

    engine_busy_s: float = 0.0
    """Virtual seconds in which the engine thread worked."""
    end_s: float = 0.0
    """Virtual time of the last event."""
    calls: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Number and processor seconds of the calls of router and scheduler, by the name of the call.

    Empty unless ``ClusterModel.measures`` is True.
    """
    link_bytes: int = 0
    handed_bytes: int = 0
    """Bytes of blocks that went from one node to another."""
    losses: int = 0
    tier_hit_blocks: int = 0
    tier_stored_blocks: int = 0

    @property
    def engine_share(self) -> float:
        """Fraction of the time in which the engine thread worked."""
        return self.engine_busy_s / self.end_s if self.end_s else 0.0

    def as_json(self) -> dict[str, Any]:
        """Returns the fields that this class adds to ``Outcome``."""
        calls = {name: {"calls": number, "cpu_s": seconds} for name, (number, seconds) in self.calls.items()}
        return {
            "engine_busy_share": self.engine_share,
            "engine_calls": calls,
            "link_bytes": self.link_bytes,
            "handed_bytes": self.handed_bytes,
            "lost_nodes": self.losses,
            "tier_hit_blocks": self.tier_hit_blocks,
            "tier_stored_blocks": self.tier_stored_blocks,
        }

    def lines(self) -> list[str]:
        """Returns the report's lines about engine thread, links and KV tiers."""
        costs = [f"{1e6 * cpu_s / number:.0f} us to {name}" for name, (number, cpu_s) in self.calls.items()]
        rate = self.link_bytes / self.end_s / 1e6 if self.end_s else 0.0
        lines = [
            f"engine   the engine thread worked {100 * self.engine_share:.0f} % of the time"
            + (f": {', '.join(costs)} (processor time per call)" if costs else ""),
            f"links    {rate:.1f} MB/s to all nodes together; {self.losses} nodes were lost",
        ]
        if self.handed_bytes:
            lines.append(f"handed   {self.handed_bytes / 1e6:.1f} MB of computed blocks went from node to node")
        if self.tier_stored_blocks:
            lines.append(f"tiers    {self.tier_stored_blocks} blocks stored, {self.tier_hit_blocks} loaded")
        return lines


class _NoPool:
    """Replaces the memory of host blocks, because a simulation has no block contents.

    Only KV tiers on a disk or in a shared folder would read the contents, and no simulated replica has these tiers.
    """

    block_bytes = 0
    is_usable = True

    def read(self, block: int) -> bytes:
        raise AssertionError("the simulated tiers are in host memory only")

    def write(self, block: int, content: bytes) -> bool:
        raise AssertionError("the simulated tiers are in host memory only")

    def expect_weights(self, digest: str, note: Callable[[str], None]) -> None:
        pass


class VirtualCluster(VirtualServer):
    """Simulates a server with a router and replicas on several nodes. An instance is used once."""

    def __init__(
        self,
        limits: SchedulerLimits,
        device: CostModel,
        source: Source,
        cluster: ClusterModel,
        host: HostModel | None = None,
        spread: Spread | None = None,
        seed: int = 0,
        routing: Routing = Routing.PREFIX,
        split: PrefillSplit | None = None,
        pools: PromptPools | None = None,
    ) -> None:
        host = host or HostModel()
        base = replace(host, from_agent_s=host.from_agent_s + cluster.latency_s)
        if cluster.measures:
            names = ("result_s", "result_seq_s", "send_s", "send_seq_s", "request_s")
            base = replace(base, **{name: getattr(REST, name) for name in names})
        count = max(cluster.num_replicas, 2)
        super().__init__(limits, device, source, base, spread, seed, count, routing, split, pools)
        assert self._router is not None
        self._model = cluster
        self._new_agent: Callable[[int], VirtualAgent] = lambda index: VirtualAgent(
            device, limits.policy.value, self._sample, spread, seed + index, result_delay_s=base.from_agent_s
        )
        self._outcome: ClusterOutcome = ClusterOutcome([])
        self._events: list[tuple[float, int]] = []
        """A heap of (time, replica index): when a replica may have a result or wake up. Entries may be outdated."""
        self._free_links = [0.0] * cluster.num_nodes
        """For each node: the time from which its link can transmit the next message to the node."""
        self._free_uplinks = [0.0] * cluster.num_nodes
        """For each node: the time from which its link can transmit the next message from the node."""
        self._handed = HandedBlocks(cluster.block_bytes)
        self._dead: set[int] = set()
        """Replicas whose node has stopped, until their agents are ready again."""
        self._changes: list[tuple[float, int, str]] = sorted(
            (loss.at_s, loss.node, "stop") for loss in cluster.losses
        )
        self._wakeups: dict[int, float] = {}
        self._extra_s = 0.0
        self._stores = [self._new_store(limits) for _ in self._replicas]
        self._now = 0.0

    def _new_store(self, limits: SchedulerLimits) -> BlockStore | None:
        if not limits.has_tiers:
            return None
        store = BlockStore(limits.num_host_blocks, self._model.tier_blocks, None, lambda: None)
        store.open(_NoPool())
        return store

    def _finish(self) -> ClusterOutcome:
        super()._finish()
        outcome = self._outcome
        outcome.end_s = self._now
        outcome.handed_bytes = round(self._handed.sent_bytes)
        for store in self._stores:
            if store is not None:
                outcome.tier_hit_blocks += store.figures.hits["host"]
                outcome.tier_stored_blocks += store.figures.stored
        return outcome

    # The following methods find the next event, and apply losses and restarts of nodes.

    def _next_event(self) -> float | None:
        due = self._source.next_due()
        times = [] if due is None else [due + self._host.accept_s]
        while self._events:
            moment, index = self._events[0]
            real = self._due(index)
            if real == moment:
                times.append(moment)
                break
            heapq.heappop(self._events)
            if real is not None and real > moment:
                heapq.heappush(self._events, (real, index))
        if self._changes and not (due is None and self.scheduler.is_idle):
            times.append(self._changes[0][0])
        return min(times, default=None)

    def _due(self, index: int) -> float | None:
        """Returns when a replica has its next result or wake-up. None: there is none, or its node has stopped."""
        if index in self._dead:
            return None
        result, wakeup = self._replicas[index].agent.next_result(), self._wakeups.get(index)
        return result if wakeup is None else wakeup if result is None else min(result, wakeup)

    def _step(self, now: float) -> None:
        self._now = now
        everything = self._change_nodes(now)
        num_records = len(self._records)
        clock = self._take_requests(now)
        concerned = set(range(len(self._replicas))) if everything else set()
        while self._events and self._events[0][0] <= now:
            concerned.add(heapq.heappop(self._events)[1])
        clock = self._take_some(sorted(concerned), now, clock)
        if len(self._records) > num_records:
            concerned |= self._of_arrivals()
        clock = self._send_some(sorted(concerned), now, clock)
        self._outcome.engine_busy_s += clock - now
        self._free_at = clock

    def _of_arrivals(self) -> set[int]:
        """Returns the index of the replica that the engine asks for steps after new requests arrived.

        One running replica is enough, because asking it makes the router place all new requests.
        """
        return {next((index for index in range(len(self._replicas)) if index not in self._dead), 0)}

    def _change_nodes(self, now: float) -> bool:
        """Applies the losses and restarts of nodes up to the time ``now``. Returns True if the server
        noticed a loss or a restart.
        """
        noticed, model, router = False, self._model, self._router
        assert router is not None
        while self._changes and self._changes[0][0] <= now:
            moment, node, kind = heapq.heappop(self._changes)
            own = range(node, len(self._replicas), model.num_nodes)
            if kind == "stop":
                self._outcome.losses += 1
                self._dead.update(own)
                self._handed.lose(node)
                heapq.heappush(self._changes, (moment + model.notice_s, node, "noticed"))
                continue
            noticed = True
            for index in own:
                replica = self._replicas[index]
                if kind == "noticed":
                    replica.source.agent_lost(now)
                    replica.num_in_flight = 0
                    if (store := self._stores[index]) is not None:
                        store.lose()
                else:
                    replica.agent = self._new_agent(index)
                    self._dead.discard(index)
                    router.agent_ready(index)
                    if (store := self._stores[index]) is not None:
                        store.open(_NoPool())
            if kind == "noticed":
                heapq.heappush(self._changes, (moment + model.restart_s, node, "ready"))
        return noticed

    # The following methods call the router and the schedulers, and measure the processor time of each call.

    def _call(self, name: str, function: Callable[[], T]) -> tuple[T, float]:
        """Calls ``function`` and returns its result and processor seconds. The seconds are 0 if
        ``ClusterModel.measures`` is False.
        """
        if not self._model.measures:
            return function(), 0.0
        begin = time.thread_time()
        result = function()
        seconds = time.thread_time() - begin
        number, total = self._outcome.calls.get(name, (0, 0.0))
        self._outcome.calls[name] = (number + 1, total + seconds)
        return result, seconds

    def _add(self, index: int, wanted: SimulatedRequest, due: float, clock: float) -> None:
        _, seconds = self._call("accept a request", lambda: super(VirtualCluster, self)._add(index, wanted, due, clock))
        self._extra_s += seconds

    def _take_requests(self, now: float) -> float:
        self._extra_s = 0.0
        return super()._take_requests(now) + self._extra_s

    def _take_some(self, indices: list[int], now: float, clock: float) -> float:
        host = self._host
        for index in indices:
            if index in self._dead:
                continue
            replica = self._replicas[index]
            for _, result in replica.agent.run_until(now):
                updates, seconds = self._call("process a result", lambda: replica.source.update(result, now))  # noqa: B023
                clock += seconds + host.result_s + host.result_seq_s * len(result.sampled_ids)
                replica.num_in_flight -= 1
                self._deliver(updates, clock)
        return clock

    def _send_some(self, indices: list[int], now: float, clock: float) -> float:
        router, outcome = self._router, self._outcome
        assert router is not None
        waiting = list(indices)
        while waiting:
            for index in waiting:
                if index not in self._dead:
                    clock = self._send_all(index, now, clock)
            waiting = [index for index in router.take_placed(now) if index not in self._dead]
        for update in self.scheduler.take_ended():
            self._end(self._records[update.request.request_id], update.request, update, clock + self._host.deliver_s)
        outcome.peak_waiting = max(outcome.peak_waiting, router.num_unplaced)
        return clock

    def _send_all(self, index: int, now: float, clock: float) -> float:
        """Sends all steps that the scheduler of replica ``index`` has, over the link of its node.

        ``clock`` is the virtual time at which the engine thread begins. Returns the time at which it has sent them.
        """
        host, replica, store = self._host, self._replicas[index], self._stores[index]
        source: Any = replica.source
        if store is not None:
            store.exchange(source, now)
        while replica.num_in_flight < NUM_SLOTS:
            step, seconds = self._call("schedule a step", lambda: source.schedule(now))
            clock += seconds
            if step is None:
                if store is not None and store.exchange(source, now):
                    continue
                break
            clock += host.send_s + host.send_seq_s * len(step.rows)
            replica.num_in_flight += 1
            arrival = self._arrival(index, step, clock + host.to_agent_s)
            replica.agent.submit(step, arrival, self._handed.missing(step))
            if step.kind is StepKind.DECODE:
                self._measure_waste(step)
        self._wakeups.pop(index, None)
        if (wakeup := source.next_wakeup(now)) is not None and wakeup > now:
            self._wakeups[index] = wakeup
        if (due := self._due(index)) is not None:
            heapq.heappush(self._events, (due, index))
        return clock

    def _arrival(self, index: int, step: ScheduledStep, sent: float) -> float:
        """Returns the time at which a step reaches its agent.

        The replicas of a node share one link. A step waits until earlier steps to this node have been transmitted.
        """
        entries = sum(len(table) for table in step.block_tables)
        num_bytes = STEP_BYTES + TOKEN_BYTES * len(step.token_ids) + ROW_BYTES * len(step.rows) + BLOCK_BYTES * entries
        node = index % self._model.num_nodes
        self._outcome.link_bytes += num_bytes
        begin = max(sent, self._free_links[node])
        self._free_links[node] = begin + num_bytes / self._model.bytes_per_s
        arrival = self._free_links[node] + self._model.latency_s
        for source, handed in self._handed.sent(step, node).items():
            arrival = max(arrival, self._handed_arrival(source, node, handed, sent))
        return arrival

    def _handed_arrival(self, source: int, node: int, num_bytes: float, asked: float) -> float:
        """Returns when handed blocks arrive at ``node``. The links of both nodes transmit them at the same time."""
        begin = max(asked + self._model.latency_s, self._free_uplinks[source], self._free_links[node])
        end = begin + num_bytes / self._model.bytes_per_s
        self._free_uplinks[source] = self._free_links[node] = end
        return end + self._model.latency_s
