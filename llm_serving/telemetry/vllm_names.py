"""The names under which vLLM's dashboards and the Gateway API Inference Extension look for the server's metrics.

``VLLM_NAMES`` has one row for each of these names. The metrics are copied at each scrape, so that a metric and its copy
always show the same values.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from llm_serving.telemetry.adapter_metrics import REQUESTS, SLOTS

ENGINE = "0"
"""Value of the label ``engine``. In vLLM, each engine has a number; here, all replicas together count as one engine."""


@dataclass(frozen=True, slots=True)
class VllmName:
    """One metric that is copied: ``source`` is its name in this server, and ``name`` its name in vLLM.

    The names of counters end with ``_total``.
    """

    name: str
    source: str
    label: tuple[str, str] | None = None
    """The only label that the copy keeps: its name in this server's metric, and its name in vLLM. None if no label is
    kept. Samples that have the same labels in the copy are added up.
    """
    difference: str = ""
    """Text for the documentation: how the meaning of the values differs from vLLM's. Empty if it is the same."""


_MEAN = "the mean of each request, not one value for each token"

VLLM_NAMES = (
    VllmName("vllm:num_requests_running", "llm_serving_requests_running"),
    VllmName("vllm:num_requests_waiting", "llm_serving_requests_waiting"),
    VllmName("vllm:kv_cache_usage_perc", "llm_serving_kv_usage_ratio"),
    VllmName("vllm:gpu_cache_usage_perc", "llm_serving_kv_usage_ratio"),
    VllmName(
        "vllm:time_to_first_token_seconds",
        "llm_serving_time_to_first_token_seconds",
        difference="streamed requests only; the time ends when the bytes are on the socket",
    ),
    VllmName("vllm:time_per_output_token_seconds", "llm_serving_time_per_output_token_seconds", difference=_MEAN),
    VllmName("vllm:inter_token_latency_seconds", "llm_serving_time_per_output_token_seconds", difference=_MEAN),
    VllmName("vllm:request_time_per_output_token_seconds", "llm_serving_time_per_output_token_seconds"),
    VllmName("vllm:e2e_request_latency_seconds", "llm_serving_request_seconds"),
    VllmName("vllm:request_queue_time_seconds", "llm_serving_queue_seconds"),
    VllmName("vllm:request_prompt_tokens", "llm_serving_request_prompt_tokens"),
    VllmName("vllm:request_generation_tokens", "llm_serving_request_output_tokens"),
    VllmName(
        "vllm:prompt_tokens_total",
        "llm_serving_prompt_tokens_total",
        difference="counted at the end of a request, not at its prefill",
    ),
    VllmName("vllm:generation_tokens_total", "llm_serving_generated_tokens_total"),
    VllmName(
        "vllm:request_success_total",
        "llm_serving_requests_finished_total",
        label=("reason", "finished_reason"),
    ),
    VllmName("vllm:num_preemptions_total", "llm_serving_preemptions_total"),
    VllmName("vllm:prefix_cache_queries_total", "llm_serving_prefix_cache_query_tokens_total"),
    VllmName("vllm:prefix_cache_hits_total", "llm_serving_prefix_cache_hit_tokens_total"),
)
"""All metrics that are copied to names of vLLM, except ``LORA_INFO``."""

LORA_INFO = VllmName(
    "vllm:lora_requests_info",
    REQUESTS,
    difference="only with adapter slots; the labels are `max_lora`, `running_lora_adapters` (all loaded adapters) and "
    "`waiting_lora_adapters` (empty, because a loaded adapter needs not wait); the value is the time of the scrape",
)
"""The metric by which the endpoint picker finds a server that has the adapter of a request."""


class VllmCollector(Collector):
    """Copies the metrics of ``registry`` to the names of vLLM, with the labels ``model_name`` and ``engine``."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._labels = {"model_name": model_name, "engine": ENGINE}

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        sources = {_exposed_name(family): family for family in self._registry.collect()}
        for row in VLLM_NAMES:
            if row.source in sources:  # the engine's gauges are missing until the engine has a status
                yield self._copy(row, sources[row.source])
        if SLOTS in sources:
            yield self._lora_info(sources[SLOTS], sources[REQUESTS])

    def _lora_info(self, slots: Metric, requests: Metric) -> Metric:
        """Returns the metric ``LORA_INFO``. Its labels have the loaded adapters, and its value is the present time."""
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        info = GaugeMetricFamily(LORA_INFO.name, "Loaded LoRA adapters. The value is the present time.", labels=labels)
        names = ",".join(sample.labels["adapter"] for sample in requests.samples)
        info.add_metric([f"{slots.samples[0].value:g}", names, ""], time.time())
        return info

    def _copy(self, row: VllmName, source: Metric) -> Metric:
        """Returns ``source`` under the name of ``row``. Samples that then have the same labels are added up."""
        name = row.name.removesuffix("_total") if source.type == "counter" else row.name
        values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in source.samples:
            suffix = sample.name.removeprefix(source.name)
            if suffix == "_created":
                continue
            labels = dict(self._labels)
            if row.label is not None:
                labels[row.label[1]] = sample.labels[row.label[0]]
            if "le" in sample.labels:
                labels["le"] = sample.labels["le"]
            key = name + suffix, tuple(labels.items())
            values[key] = values.get(key, 0.0) + sample.value
        copy = Metric(name, f"{source.documentation} A copy of {row.source}.", source.type)
        copy.samples = [Sample(sample_name, dict(labels), value) for (sample_name, labels), value in values.items()]
        return copy


def _exposed_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name
