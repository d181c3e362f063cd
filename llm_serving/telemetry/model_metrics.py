"""Prometheus metrics of each model, if the server has several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_GAUGES = {
    "requests": ("model_requests", "HTTP requests that use the model now."),
    "memory_bytes": ("model_memory_bytes", "Planned memory of the model's versions in memory."),
    "wake_seconds": (
        "model_wake_seconds",
        "Expected time until the model serves; 0 if it serves now. Absent if no start was seen.",
    ),
}
_COUNTERS = {
    "starts": ("model_starts", "Starts of the model, also from sleep, without the main model's start."),
    "reloads": ("model_reloads", "Replacements of the model's version."),
}


class ModelFigures(Protocol):
    """The part of a model's status that the metrics show."""

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> str: ...


class ModelCollector(Collector):
    """Collects the state of each model, with the label ``model``. ``states`` are the names of all states."""

    def __init__(self, statuses: Callable[[], Sequence[ModelFigures]], states: Sequence[str]) -> None:
        self._statuses = statuses
        self._states = states

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        statuses = self._statuses()
        state = GaugeMetricFamily(
            "llm_serving_model_state", "1 for the present state of the model.", labels=["model", "state"]
        )
        for status in statuses:
            for each in self._states:
                state.add_metric([status.name, each], float(each == status.state))
        yield state
        for family, fields in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for field, (name, meaning) in fields.items():
                values = family(f"llm_serving_{name}", meaning, labels=["model"])
                for status in statuses:
                    if (value := getattr(status, field)) is not None:
                        values.add_metric([status.name], value)
                yield values
