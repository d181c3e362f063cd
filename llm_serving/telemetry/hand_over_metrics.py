"""Prometheus metrics of separate prefill and decode. They are absent if replicas have no roles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

COUNTERS = {
    "completed": ("hand_overs", "Prompts that a prefill replica computed and a decode replica continued."),
    "blocks": ("hand_over_blocks", "Blocks that arrived at decode replicas."),
    "seconds": (
        "hand_over_seconds",
        "Sum of the times from the end of a prefill to the arrival of all blocks at the decode replica.",
    ),
    "misses": (
        "hand_over_misses",
        "Hand-overs with a block that was not the expected one. Their requests were computed again.",
    ),
    "reloads": ("hand_over_reloads", "Handed requests that a second decode replica loaded, as the first was lost."),
    "transfer_seconds": (
        "hand_over_transfer_seconds",
        "Sum of the times in which blocks were sent to other machines. Without other machines, it is 0.",
    ),
    "failed_transfers": (
        "hand_over_failed_transfers",
        "Hand-overs whose blocks could not be sent to another machine. Their requests were computed again.",
    ),
    "refused": ("hand_over_refused", "Hand-overs that were given up because no decode replica was ready."),
}
GAUGES = {
    "pool_blocks": ("hand_over_pool_blocks", "Blocks of the hand-over pool."),
    "pool_free_blocks": ("hand_over_pool_free_blocks", "Free blocks of the hand-over pool."),
    "threshold_tokens": (
        "hand_over_threshold_tokens",
        "Uncached tokens from which a prompt goes to a prefill replica. -1 while hand-overs do not pay.",
    ),
}


def hand_over_families(figures: Mapping[str, float]) -> Iterable[Metric]:
    """Returns the metrics of the hand-overs between all replicas. ``figures`` comes from ``PrefillSplit.as_json``."""
    for field, (name, text) in COUNTERS.items():
        yield CounterMetricFamily(f"llm_serving_{name}", text, value=figures[field])
    for field, (name, text) in GAUGES.items():
        yield GaugeMetricFamily(f"llm_serving_{name}", text, value=figures[field])
