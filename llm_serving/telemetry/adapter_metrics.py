"""Prometheus metrics of LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SLOTS, REQUESTS = "llm_serving_adapter_slots", "llm_serving_adapter_requests"


class AdapterFigures(Protocol):
    """The numbers about a server's LoRA adapters that the metrics show."""

    @property
    def max_adapters(self) -> int: ...

    @property
    def open_requests(self) -> Mapping[str, int]: ...


class AdapterCollector(Collector):
    """Collects the number of adapter slots, and the number of open requests of each loaded adapter. Without adapter
    slots, there are no metrics.
    """

    def __init__(self, adapters: Callable[[], AdapterFigures]) -> None:
        self._adapters = adapters

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        adapters = self._adapters()
        if not adapters.max_adapters:
            return
        yield GaugeMetricFamily(SLOTS, "Slots for LoRA adapters of the main model.", value=adapters.max_adapters)
        meaning = "Open requests of each loaded LoRA adapter, only of the present version of the main model."
        requests = GaugeMetricFamily(REQUESTS, meaning, labels=["adapter"])
        for name, number in adapters.open_requests.items():
            requests.add_metric([name], number)
        yield requests
