"""Prometheus metrics of shadow serving. They are absent without shadow serving."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

RECOMMENDATIONS = ("wait", "promote", "keep")


class ShadowCollector(Collector):
    """Collects the figures that ``GET /v1/shadow`` shows, which ``figures`` returns."""

    def __init__(self, figures: Callable[[], Mapping[str, Any]]) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        figures = self._figures()
        answers = GaugeMetricFamily(
            "llm_serving_shadow_answers",
            "Answers of shadow serving since its beginning: compared, or why they were left out.",
            labels=["outcome"],
        )
        for outcome, count in figures["answers"].items():
            answers.add_metric([outcome], count)
        yield answers
        verdict = GaugeMetricFamily(
            "llm_serving_shadow_recommendation", "1 for the present recommendation.", labels=["recommendation"]
        )
        for each in RECOMMENDATIONS:
            verdict.add_metric([each], float(each == figures["recommendation"]))
        yield verdict
        comparison = figures["comparison"]
        for name, meaning, value in (
            ("agreement", "Share of tokens with the same most likely token in both models.", comparison["agreement"]),
            (
                "perplexity_change",
                "Perplexity of the candidate divided by that of the main model, minus 1.",
                comparison["perplexity"]["change"],
            ),
            (
                "latency_ratio",
                "Median time of the candidate for an answer, divided by that of the main model.",
                comparison["latency_ratio"],
            ),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"llm_serving_shadow_{name}", meaning, value=value)


