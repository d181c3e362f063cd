"""Tests ``telemetry/statistics.py``, which computes percentiles, summaries and latencies for the server and the tools.
"""

import random

import numpy as np
import pytest

from llm_serving.telemetry.statistics import (
    EMPTY_SUMMARY,
    Distribution,
    Summary,
    normalized_latency,
    percentile,
    summarize,
    time_per_output_token,
)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 0, 7.0),
        ([7.0], 99, 7.0),
        ([1.0, 2.0], 50, 1.5),
        ([1.0, 2.0, 3.0, 4.0], 50, 2.5),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 50, 3.0),
        ([0.0, 10.0], 90, 9.0),
        ([float(i) for i in range(101)], 99, 99.0),
        ([1.0, 2.0, 3.0], 100, 3.0),
    ],
)
def test_percentile_interpolates_between_ranks(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == expected


def test_percentile_is_numpys() -> None:
    generator = random.Random(1)
    for size in (1, 2, 3, 10, 999):
        values = sorted(generator.expovariate(1.0) for _ in range(size))
        for percent in (0, 1, 50, 90, 99, 99.9, 100):
            assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-14)


def test_summary() -> None:
    assert summarize([4.0, 1.0, 3.0, 2.0]) == Summary(4, 2.5, 2.5, 3.7, 3.85, 3.97, 1.0, 4.0)
    assert summarize([]) == EMPTY_SUMMARY
    assert summarize([0.1] * 10).mean == 0.1
    assert EMPTY_SUMMARY.as_dict() == {
        "count": 0, "mean": None, "p50": None, "p90": None, "p95": None, "p99": None, "min": None, "max": None,
    }  # fmt: skip


def test_time_per_output_token_divides_by_the_gaps() -> None:
    assert time_per_output_token(1.0, 3.0, 5) == 0.5
    assert time_per_output_token(1.0, 1.0, 1) is None
    assert time_per_output_token(1.0, 1.0, 0) is None


def test_normalized_latency() -> None:
    assert normalized_latency(3.0, 6) == 0.5
    assert normalized_latency(3.0, 0) is None


def test_adding_many_values_equals_adding_one_by_one() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 2.5]
    for limit in (3, 4, 100):
        one_by_one, at_once = Distribution(exact_limit=limit), Distribution(exact_limit=limit)
        for value in values:
            one_by_one.add(value)
        at_once.extend(values[:3])
        at_once.extend([])
        at_once.extend(values[3:])
        assert at_once.summary() == one_by_one.summary()
        assert at_once.is_exact == one_by_one.is_exact


def test_a_distribution_is_exact_up_to_its_limit() -> None:
    values = [5.0, 1.0, 4.0]
    distribution = Distribution(exact_limit=3)
    for value in values:
        distribution.add(value)
    assert distribution.is_exact
    assert distribution.summary() == summarize(values)


def test_an_empty_distribution() -> None:
    assert Distribution().summary() == EMPTY_SUMMARY


def test_a_large_distribution_is_close_and_small() -> None:
    generator = random.Random(2)
    values = [generator.lognormvariate(3.0, 2.0) for _ in range(20_000)] + [0.0] * 10
    distribution = Distribution(exact_limit=1000)
    for value in values:
        distribution.add(value)
    exact, close = summarize(values), distribution.summary()
    assert not distribution.is_exact
    assert (close.count, close.min, close.max) == (exact.count, exact.min, exact.max)
    assert close.mean == pytest.approx(exact.mean, rel=1e-12)
    assert close.p50 == pytest.approx(exact.p50, rel=0.001)
    assert close.p90 == pytest.approx(exact.p90, rel=0.001)
    assert close.p99 == pytest.approx(exact.p99, rel=0.001)
    assert len(distribution._buckets) < 12_000


def test_a_large_distribution_of_one_value_is_that_value() -> None:
    distribution = Distribution(exact_limit=2)
    for _ in range(5):
        distribution.add(0.0)
    summary = distribution.summary()
    assert (summary.p50, summary.p99, summary.mean) == (0.0, 0.0, 0.0)
