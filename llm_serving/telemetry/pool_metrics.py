"""Prometheus metrics of the pools of replicas by prompt length. They are absent if there are no pools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from llm_serving.routing.pools import PoolStatus

GAUGES = {
    "ready": ("pool_replicas_ready", "Replicas of the pool that may get requests."),
    "waiting": ("pool_requests_waiting", "Requests of the pool that wait for a replica."),
}
PLACED = ("pool_requests_placed", "Requests placed at replicas of the pool, also those of other pools.")


def pool_families(pools: Sequence[PoolStatus]) -> Iterable[Metric]:
    """Returns the metrics of each pool, with the label ``pool``."""
    for field, (name, text) in GAUGES.items():
        gauge = GaugeMetricFamily(f"llm_serving_{name}", text, labels=["pool"])
        for pool in pools:
            gauge.add_metric([pool.name], getattr(pool, field))
        yield gauge
    name, text = PLACED
    placed = CounterMetricFamily(f"llm_serving_{name}", text, labels=["pool"])
    for pool in pools:
        placed.add_metric([pool.name], pool.placed)
    yield placed
