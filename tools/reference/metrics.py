"""Generates docs/metrics.md from the Prometheus metrics of the server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from llm_serving.energy.meter import EnergyMeter
from llm_serving.kvstore.disk import DiskFigures
from llm_serving.kvstore.store import TierFigures
from llm_serving.registry.states import ModelState
from llm_serving.routing.placement import Placed
from llm_serving.telemetry import hand_over_metrics
from llm_serving.telemetry.adapter_metrics import AdapterCollector
from llm_serving.telemetry.metrics import Metrics
from llm_serving.telemetry.model_metrics import ModelCollector
from llm_serving.telemetry.node_metrics import NodeCollector
from llm_serving.telemetry.npu_metrics import NpuCollector
from llm_serving.telemetry.npu_smi import Chip
from llm_serving.telemetry.shadow_metrics import ShadowCollector
from llm_serving.telemetry.vllm_names import LORA_INFO, VLLM_NAMES

INTRODUCTION = """\
# Metrics

For operators who build dashboards and alerts. [Operations](operations.md#metrics) lists the questions that they answer.

<!-- Written by tools/write_reference_docs.py from llm_serving/telemetry. Edit there. -->

`GET /metrics` returns these metrics in Prometheus' text format. Times are in seconds. A histogram has the series
`..._bucket`, `..._sum` and `..._count`.

"""

VLLM_INTRODUCTION = """
## Names of vLLM

With `telemetry_config.vllm_metric_names: true`, `GET /metrics` repeats these metrics under vLLM's names. They have the
labels `model_name` and `engine` (always `0`). [Observability](observability.md#names-of-vllm) has an example.

| metric | copy of | further label | difference to vLLM |
|---|---|---|---|
"""


class _Status(SimpleNamespace):
    """Stands for the status of an engine or replica. All its numbers are 0, which is enough to list the metrics."""

    def __getattr__(self, name: str) -> Any:
        return _Status() if name == "figures" else 0


def metrics_page() -> str:
    """Returns the page docs/metrics.md."""
    agent = {"rank": 0, "state": "ready", "summary": {"weight_bytes": 0, "kv_cache_bytes": 0}}
    tiers = TierFigures(disk=DiskFigures(), shared=DiskFigures())
    replica = _Status(state="ready", placed={each.value: 0 for each in Placed}, tiers=tiers)
    metrics = Metrics()
    chips = [Chip(0, 0, 0, "", "OK", 0, 0, 0.0, 0.0, 0)]
    npus = NpuCollector(0, 1, lambda: chips)
    npus.update()
    metrics.registry.register(npus)
    metrics.registry.register(_energy())
    metrics.registry.register(AdapterCollector(lambda: SimpleNamespace(max_adapters=1, open_requests={"": 0})))
    metrics.registry.register(NodeCollector(lambda: SimpleNamespace(status=list)))
    model = _Status(name="", state="ready")
    metrics.registry.register(ModelCollector(lambda: [model], [each.value for each in ModelState]))
    shadow = {"answers": {"compared": 0}, "recommendation": "wait"}
    comparison = {"agreement": 0.0, "perplexity": {"change": 0.0}, "latency_ratio": 0.0}
    metrics.registry.register(ShadowCollector(lambda: {**shadow, "comparison": comparison}))
    hand_overs = dict.fromkeys((*hand_over_metrics.COUNTERS, *hand_over_metrics.GAUGES), 0)
    pool = _Status(name="")
    status = _Status(state="ready", agents=[agent], replicas=[replica], hand_overs=hand_overs, pools=[pool])
    metrics.bind(lambda: status)  # type: ignore[arg-type, return-value]
    declared = {each._name: each._labelnames for each in metrics.registry._collector_to_names if hasattr(each, "_name")}
    titles = ("Requests and steps", "Models", "Replicas", "Agents", "NPUs", "Process")
    rows: dict[str, list[str]] = {title: [] for title in titles}
    for family in sorted(metrics.registry.collect(), key=lambda each: each.name):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(_label(label, family) for label in declared.get(family.name) or _labels(family))
        rows[_section(name)].append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |\n")
    header = "| metric | type | labels | meaning |\n|---|---|---|---|\n"
    sections = [f"## {title}\n\n{header}{''.join(lines)}" for title, lines in rows.items()]
    return INTRODUCTION + "\n".join(sections) + _vllm_names()


def _energy() -> EnergyMeter:
    """Returns an energy meter that has completed an interval, so that it reports all of its metrics."""
    tokens = iter((0.0, 1.0, 2.0))
    meter = EnergyMeter(lambda: next(tokens), [_Status(joules=lambda: 0.0)])
    meter.end_interval()
    return meter


def _vllm_names() -> str:
    rows = (
        f"| `{row.name}` | `{row.source}` |{f' {row.label[1]} = {row.label[0]} ' if row.label else ' '}"
        f"| {row.difference} |\n"
        for row in (*VLLM_NAMES, LORA_INFO)
    )
    return VLLM_INTRODUCTION + "".join(rows)


def _section(name: str) -> str:
    parts = {"llm_serving_replica_": "Replicas", "llm_serving_agent_": "Agents", "llm_serving_npu_": "NPUs"}
    parts["llm_serving_pool_"] = "Replicas"
    parts["llm_serving_model_"] = "Models"
    parts["llm_serving_"] = "Requests and steps"
    return next((title for prefix, title in parts.items() if name.startswith(prefix)), "Process")


def _labels(family: Any) -> list[str]:
    return list(dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le"))


def _label(name: str, family: Any) -> str:
    """Returns a metric's label as text, with its possible values if the server defines them in advance."""
    values = list(dict.fromkeys(sample.labels[name] for sample in family.samples if name in sample.labels))
    fixed = values and name not in ("adapter", "model", "pool", "replica", "rank", "device")
    return f"`{name}` ({', '.join(values)})" if fixed else f"`{name}`"
