"""Prometheus metrics of the KV tiers. They are absent without KV tiers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from llm_serving.kvstore.disk import DiskFigures
from llm_serving.kvstore.store import TierFigures

_COUNTERS = {
    "misses": ("missed_blocks", "Blocks of waiting requests that no KV tier had."),
    "stored": ("stored_blocks", "Computed blocks that were copied to the host."),
    "dropped": ("dropped_blocks", "Computed blocks that were evicted before they could be copied to the host."),
    "too_slow": ("too_slow_blocks", "Blocks on the SSD whose computation was expected to take less time than a read."),
    "expired": ("expired_reads", "Reads from the SSD that took so long that their request was computed instead."),
}
_FILE_COUNTERS = {
    "written_blocks": ("written_blocks", "Blocks written to the {}."),
    "written_bytes": ("written_bytes", "Bytes written to the {}."),
    "read_bytes": ("read_bytes", "Bytes read from the {}."),
    "rejected": ("rejected_records", "Records of the {} that were damaged, cut off or not the wanted block."),
    "failed_writes": ("failed_writes", "Writes to the {} that failed, for example because the disk was full."),
}
"""Maps each count of the SSD and of the shared folder to the name and the help text of its metric. In a help text,
``{}`` is replaced by the name of the tier.
"""


def tier_families(tiers: Sequence[TierFigures]) -> Iterable[Metric]:
    """Returns the metrics of the KV tiers of all replicas together."""
    if not tiers:
        return
    hits = CounterMetricFamily(
        "llm_serving_kv_tier_hit_blocks", "Blocks of waiting requests that a KV tier had.", labels=["tier"]
    )
    for tier in ("host", "ssd", "shared"):
        hits.add_metric([tier], sum(one.hits[tier] for one in tiers))
    yield hits
    for field, (name, text) in _COUNTERS.items():
        value = sum(getattr(one, field) for one in tiers)
        yield CounterMetricFamily(f"llm_serving_kv_tier_{name}", text, value=value)
    held = sum(one.host_blocks for one in tiers)
    kept = sum(one.kept_blocks for one in tiers)
    yield GaugeMetricFamily("llm_serving_kv_tier_kept_blocks", "Host blocks that requests asked to keep.", value=kept)
    yield GaugeMetricFamily("llm_serving_kv_tier_host_blocks", "Host blocks with a copy of a block.", value=held)
    if tiers[0].disk is not None:
        yield from _file_families(tiers[0].disk, "ssd", "SSD")
    if tiers[0].shared is not None:
        yield from _file_families(tiers[0].shared, "shared", "shared folder")


def _file_families(figures: DiskFigures, tier: str, place: str) -> Iterable[Metric]:
    start = f"llm_serving_kv_tier_{tier}"
    for field, (name, text) in _FILE_COUNTERS.items():
        yield CounterMetricFamily(f"{start}_{name}", text.format(place), value=getattr(figures, field))
    yield GaugeMetricFamily(f"{start}_blocks", f"Blocks of this model in the files of the {place}.", figures.blocks)
    yield GaugeMetricFamily(f"{start}_bytes", f"Size of the files of the {place}.", value=figures.num_bytes)
    text = f"1 while nothing is written to the {place} because a write has failed."
    yield GaugeMetricFamily(f"{start}_full", text, value=float(figures.is_full))
