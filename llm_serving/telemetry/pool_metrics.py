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
    "running": ("pool_requests_running", "Requests in the batches of the pool's replicas."),
}
NEEDING = (
    "pool_requests",
    "Requests that need the pool: its own, wherever they run, and those of other pools at its replicas. One more while "
    "requests that were refused without a ready node may be retried.",
)
PLACED = ("pool_requests_placed", "Requests placed at replicas of the pool, also those of other pools.")


def pool_families(pools: Sequence[PoolStatus], *, awaits_retry: bool) -> Iterable[Metric]:
    """Returns the metrics of each pool, with the label ``pool``.

    ``awaits_retry``: a refused request may be retried. Its pool is not known, so it counts as a request of each pool.
    """
    name, text = NEEDING
    needing = GaugeMetricFamily(f"llm_serving_{name}", text, labels=["pool"])
    for pool in pools:
        needing.add_metric([pool.name], pool.needing + awaits_retry)
    yield needing
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
