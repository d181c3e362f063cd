"""Metrics that are read off the engine's status when a scrape asks for them, and not counted along the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llm_serving.telemetry.agent_metrics import agent_families

if TYPE_CHECKING:
    from llm_serving.engine.status import ReplicaStatus
    from llm_serving.server.engine_api import EngineStatus

__all__ = ["StatusCollector"]

_STATES = ("starting", "ready", "recovering", "stopped")

# Fields of a status: name and help of the metric that has the field's value.

_ENGINE_GAUGES = {
    "running": ("requests_running", "Requests in the batch."),
    "waiting": ("requests_waiting", "Requests in the queue."),
    "total_blocks": ("kv_blocks_total", "Cache blocks there are."),
    "swapped": ("requests_swapped", "Requests whose keys and values are in host memory."),
    "kv_waste": ("kv_waste_ratio", "Share of the running requests' token slots in the cache that hold nothing."),
}
_ENGINE_COUNTERS = {
    "prefix_query_tokens": ("prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_hit_tokens": ("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache."),
    "steps": ("steps", "Steps answered."),
    "recorder_s": ("flight_recorder_seconds", "Time of the engine's thread that the flight recorder took."),
}
_REPLICA_GAUGES = {
    "running": ("requests_running", "Requests in the replica's batch."),
    "waiting": ("requests_waiting", "Requests placed at the replica that have no blocks there."),
    "total_blocks": ("kv_blocks_total", "Cache blocks of the replica."),
    "outstanding_tokens": (
        "outstanding_tokens",
        "Tokens the replica's requests may still take, at the last placement.",
    ),
}
_REPLICA_COUNTERS = {
    "steps": ("steps", "Steps the replica answered."),
    "preemptions": ("preemptions", "Requests that lost their cache blocks there."),
    "prefix_query_tokens": ("prefix_cache_query_tokens", "Prompt tokens looked up in the replica's prefix cache."),
    "prefix_hit_tokens": ("prefix_cache_hit_tokens", "Prompt tokens found in the replica's prefix cache."),
    "recalled": ("requests_recalled", "Requests that went from the replica to another."),
}


class StatusCollector(Collector):
    """``status`` gives the engine's; nothing is collected while it is None."""

    def __init__(self) -> None:
        self.status: Callable[[], EngineStatus] | None = None

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        if self.status is None:
            return
        status = self.status()
        yield from _engine_families(status)
        yield from _replica_families(status.replicas)
        yield from agent_families(status.agents)


def _engine_families(status: EngineStatus) -> Iterable[Metric]:
    for family, figures in ((GaugeMetricFamily, _ENGINE_GAUGES), (CounterMetricFamily, _ENGINE_COUNTERS)):
        for field, (name, text) in figures.items():
            yield family(f"llm_serving_{name}", text, value=getattr(status, field))
    used = status.total_blocks - status.free_blocks
    yield GaugeMetricFamily("llm_serving_kv_blocks_used", "Cache blocks in use.", value=used)
    usage = used / status.total_blocks if status.total_blocks else 0.0
    yield GaugeMetricFamily("llm_serving_kv_usage_ratio", "Share of cache blocks in use.", value=usage)
    state = GaugeMetricFamily("llm_serving_engine_state", "1 for the state the engine is in.", labels=["state"])
    for name in _STATES:
        state.add_metric([name], float(name == status.state))
    yield state


def _replica_families(replicas: Sequence[ReplicaStatus]) -> Iterable[Metric]:
    """Each replica of the model, by the label ``replica``."""
    ready = GaugeMetricFamily("llm_serving_replica_ready", "1 while the replica serves.", labels=["replica"])
    used = GaugeMetricFamily("llm_serving_replica_kv_blocks_used", "Cache blocks in use there.", labels=["replica"])
    placed = CounterMetricFamily(
        "llm_serving_replica_requests_placed",
        "Requests given to the replica, by why: it held most of the prompt, had the least to do, its turn, its group.",
        labels=["replica", "reason"],
    )
    for one in replicas:
        label = str(one.replica)
        ready.add_metric([label], float(one.state == "ready"))
        used.add_metric([label], one.total_blocks - one.free_blocks)
        for reason, number in one.placed.items():
            placed.add_metric([label, reason], number)
    yield from (ready, used, placed)
    for family, figures in ((GaugeMetricFamily, _REPLICA_GAUGES), (CounterMetricFamily, _REPLICA_COUNTERS)):
        for field, (name, text) in figures.items():
            values = family(f"llm_serving_replica_{name}", text, labels=["replica"])
            for one in replicas:
                values.add_metric([str(one.replica)], getattr(one, field))
            yield values
