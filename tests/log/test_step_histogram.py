"""Compares the histograms of steps with those of ``prometheus_client``."""

from __future__ import annotations

import sys
import threading

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from llm_serving.telemetry.step_histogram import StepHistogram, StepSeries

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


def test_threads_of_several_engines_lose_no_value() -> None:
    series, number = StepSeries(BOUNDS), 50_000

    def observe() -> None:
        for _ in range(number):
            series.observe(1.0)

    interval, threads = sys.getswitchinterval(), [threading.Thread(target=observe) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert (sum(series.counts), series.total) == (2 * number, 2.0 * number)
