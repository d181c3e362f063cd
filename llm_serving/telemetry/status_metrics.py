"""Prometheus metrics that are read at each scrape: the engine's status, and the lines that logs dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llm_serving.telemetry.log_file import dropped_lines
from llm_serving.telemetry.status import EngineState, EngineStatus, ReplicaStatus
from llm_serving.telemetry.tier_metrics import tier_families

AGENT_STATES = ("starting", "ready", "restarting", "stopped")
_AGENT_LABELS = ["replica", "rank"]

# Each table maps a field of a status, or of its figures, to the name and the help text of its metric.

_ENGINE_GAUGES = {
    "running": ("requests_running", "Requests in the batch."),
    "waiting": (
        "requests_waiting",
        "Requests in the queue. Also 1 while requests that were refused without a ready node may be retried.",
    ),
    "total_blocks": ("kv_blocks_total", "Blocks of the KV cache."),
    "swapped": ("requests_swapped", "Requests whose keys and values are in host memory."),
    "kv_waste": ("kv_waste_ratio", "Fraction of the running requests' cache positions that hold no token."),
}
_ENGINE_COUNTERS = {
    "prefix_query_tokens": ("prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_hit_tokens": ("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache."),
    "steps": ("steps", "Completed steps."),
    "recorder_s": ("flight_recorder_seconds", "Time of the engine thread that the flight recorder took."),
}
_REPLICA_GAUGES = {
    "running": ("requests_running", "Requests in the replica's batch."),
    "waiting": ("requests_waiting", "Requests that were placed at the replica and wait for blocks."),
    "total_blocks": ("kv_blocks_total", "Blocks of the replica's KV cache."),
    "outstanding_tokens": (
        "outstanding_tokens",
        "Maximum number of tokens that the replica's requests may still take, at the last placement.",
    ),
}
_REPLICA_COUNTERS = {
    "steps": ("steps", "Steps that the replica completed."),
    "preemptions": ("preemptions", "Requests of the replica that lost their cache blocks."),
    "prefix_query_tokens": ("prefix_cache_query_tokens", "Prompt tokens looked up in the replica's prefix cache."),
    "prefix_hit_tokens": ("prefix_cache_hit_tokens", "Prompt tokens found in the replica's prefix cache."),
    "recalled": ("requests_recalled", "Requests that were moved from the replica to another."),
}


class StatusCollector(Collector):
    """Collects metrics from the engine's status, which the function ``status`` returns.

    While ``status`` is None, there are no metrics.
    """

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
        yield from _agent_families(status.agents)
        yield from tier_families([one.tiers for one in status.replicas if one.tiers is not None])
        if status.hand_overs is not None:
            from llm_serving.telemetry.hand_over_metrics import hand_over_families

            yield from hand_over_families(status.hand_overs)
        if status.pools:
            from llm_serving.telemetry.pool_metrics import pool_families

            yield from pool_families(status.pools, awaits_retry=status.awaits_retry)


class DroppedLinesCollector(Collector):
    """Collects how many lines of the logs of this process were not written."""

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "llm_serving_log_lines_dropped",
            "Lines of the event log and of agent logs that were not written: lost (disk full), or suppressed (more "
            "than the limit of the event).",
            labels=["reason"],
        )
        for reason, number in dropped_lines.counts().items():
            family.add_metric([reason], number)
        yield family


def _value(status: EngineStatus | ReplicaStatus, field: str) -> float:
    """Returns the value of ``field``, which is an attribute of the status or of the status's ``figures``."""
    value: float = getattr(status if hasattr(status, field) else status.figures, field)
    return value


def _engine_families(status: EngineStatus) -> Iterable[Metric]:
    for family, figures in ((GaugeMetricFamily, _ENGINE_GAUGES), (CounterMetricFamily, _ENGINE_COUNTERS)):
        for field, (name, text) in figures.items():
            yield family(f"llm_serving_{name}", text, value=_value(status, field))
    total, used = status.figures.total_blocks, status.figures.used_blocks
    yield GaugeMetricFamily("llm_serving_kv_blocks_used", "Cache blocks in use.", value=used)
    usage = used / total if total else 0.0
    yield GaugeMetricFamily("llm_serving_kv_usage_ratio", "Fraction of the cache blocks in use.", value=usage)
    state = GaugeMetricFamily("llm_serving_engine_state", "1 for the engine's present state.", labels=["state"])
    for one in EngineState:
        state.add_metric([one.value], float(one.value == status.state))
    yield state


def _replica_families(replicas: Sequence[ReplicaStatus]) -> Iterable[Metric]:
    """Returns the metrics of each replica, with the label ``replica``."""
    ready = GaugeMetricFamily("llm_serving_replica_ready", "1 while the replica serves.", labels=["replica"])
    used = GaugeMetricFamily(
        "llm_serving_replica_kv_blocks_used", "Cache blocks of the replica in use.", labels=["replica"]
    )
    placed = CounterMetricFamily(
        "llm_serving_replica_requests_placed",
        "Requests placed at the replica. Reasons: it held most of the prompt, had the smallest load, was next, has "
        "the request's group, computes long prompts, or decodes a handed one.",
        labels=["replica", "reason"],
    )
    for one in replicas:
        label = str(one.replica)
        ready.add_metric([label], float(one.state == "ready"))
        used.add_metric([label], one.figures.used_blocks)
        for reason, number in one.placed.items():
            placed.add_metric([label, reason], number)
    yield from (ready, used, placed)
    for family, figures in ((GaugeMetricFamily, _REPLICA_GAUGES), (CounterMetricFamily, _REPLICA_COUNTERS)):
        for field, (name, text) in figures.items():
            values = family(f"llm_serving_replica_{name}", text, labels=["replica"])
            for one in replicas:
                values.add_metric([str(one.replica)], _value(one, field))
            yield values


def _agent_families(agents: Sequence[Mapping[str, Any]]) -> Iterable[Metric]:
    """Returns the metrics of each agent, with the labels ``replica`` and ``rank``."""
    state = GaugeMetricFamily(
        "llm_serving_agent_state", "1 for the agent's present state.", labels=[*_AGENT_LABELS, "state"]
    )
    restarts = CounterMetricFamily(
        "llm_serving_agent_restarts", "Number of restarts of the agent's group.", labels=_AGENT_LABELS
    )
    weights = GaugeMetricFamily("llm_serving_agent_weight_bytes", "Bytes of the agent's weights.", labels=_AGENT_LABELS)
    cache = GaugeMetricFamily(
        "llm_serving_agent_kv_cache_bytes", "Bytes of the agent's KV cache.", labels=_AGENT_LABELS
    )
    for agent in agents:
        labels = [str(agent.get("replica", 0)), str(agent["rank"])]
        for name in AGENT_STATES:
            state.add_metric([*labels, name], float(name == agent["state"]))
        restarts.add_metric(labels, agent.get("restarts", 0))
        summary = agent.get("summary", {})
        for family, key in ((weights, "weight_bytes"), (cache, "kv_cache_bytes")):
            if key in summary:
                family.add_metric(labels, summary[key])
    return state, restarts, weights, cache
