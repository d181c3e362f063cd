"""Prometheus metrics of the KV tiers. Without KV tiers there are none."""

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
_SSD_COUNTERS = {
    "written_blocks": ("written_blocks", "Blocks written to the SSD."),
    "written_bytes": ("written_bytes", "Bytes written to the SSD."),
    "read_bytes": ("read_bytes", "Bytes read from the SSD."),
    "rejected": ("rejected_records", "Records on the SSD that were damaged, cut off or not the wanted block."),
    "failed_writes": ("failed_writes", "Writes to the SSD that failed, for example because the disk was full."),
}


def tier_families(tiers: Sequence[TierFigures]) -> Iterable[Metric]:
    """Return the metrics of the KV tiers of all replicas together."""
    if not tiers:
        return
    hits = CounterMetricFamily(
        "llm_serving_kv_tier_hit_blocks", "Blocks of waiting requests that a KV tier had.", labels=["tier"]
    )
    for tier in ("host", "ssd"):
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
        yield from _ssd_families(tiers[0].disk)


def _ssd_families(disk: DiskFigures) -> Iterable[Metric]:
    for field, (name, text) in _SSD_COUNTERS.items():
        yield CounterMetricFamily(f"llm_serving_kv_tier_ssd_{name}", text, value=getattr(disk, field))
    yield GaugeMetricFamily("llm_serving_kv_tier_ssd_blocks", "Blocks of this model on the SSD.", value=disk.blocks)
    yield GaugeMetricFamily("llm_serving_kv_tier_ssd_bytes", "Size of the files on the SSD.", value=disk.num_bytes)
    text = "1 while the SSD tier writes nothing because a write has failed."
    yield GaugeMetricFamily("llm_serving_kv_tier_ssd_full", text, value=float(disk.is_full))
