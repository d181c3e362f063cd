"""Metrics of every agent, by the labels ``replica`` and ``rank``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

AGENT_STATES = ("starting", "ready", "restarting", "stopped")
_LABELS = ["replica", "rank"]


def agent_families(agents: Sequence[Mapping[str, Any]]) -> Iterable[Metric]:
    """From what ``Executor.agents`` tells of each."""
    state = GaugeMetricFamily("llm_serving_agent_state", "1 for the state the agent is in.", labels=[*_LABELS, "state"])
    restarts = CounterMetricFamily(
        "llm_serving_agent_restarts", "Times the agent's group was restarted.", labels=_LABELS
    )
    weights = GaugeMetricFamily("llm_serving_agent_weight_bytes", "Weights that the agent holds.", labels=_LABELS)
    cache = GaugeMetricFamily(
        "llm_serving_agent_kv_cache_bytes", "Keys and values that it has room for.", labels=_LABELS
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
