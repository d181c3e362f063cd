"""Compares the histograms of steps with those of ``prometheus_client``."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from llm_serving.telemetry.step_histogram import StepHistogram

BOUNDS = (0.0, 0.001, 0.25, 1.0, 64)
VALUES = {"a": [0.0, 0.0005, 0.001, 0.0011, 0.25, 64, 64.5], "b": [1e9, -1.0], "c": []}


def lines_of(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@pytest.mark.parametrize("label", ["", "kind"])
def test_the_exposition_is_that_of_prometheus_client(label: str) -> None:
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry()
    kinds = tuple(VALUES) if label else ("",)
    histogram = StepHistogram("seconds", "Its meaning.", BOUNDS, label, kinds)
    ours.register(histogram)
    expected = Histogram("seconds", "Its meaning.", [label] if label else [], buckets=BOUNDS, registry=theirs)
    for kind in kinds:
        series = expected.labels(kind) if label else expected
        for value in VALUES[kind or "a"]:
            histogram.series[kind].observe(value)
            series.observe(value)
    assert lines_of(ours) == lines_of(theirs)
