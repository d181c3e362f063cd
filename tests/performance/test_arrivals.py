"""Tests the arrival times of a load. Their number is exact, and they depend only on the seed."""

import math
from itertools import pairwise

import pytest

from performance.load.arrivals import arrival_times, poisson_arrivals, request_count, uniform_arrivals


@pytest.mark.parametrize(
    ("rate", "duration", "count"), [(10, 150, 1500), (10, 30, 300), (0.1, 5, 0), (0.3, 5, 2), (2.5, 3, 8), (1, 0.6, 1)]
)
def test_the_count_is_rate_times_duration(rate: float, duration: float, count: int) -> None:
    assert request_count(rate, duration) == count
    for kind in ("poisson", "uniform"):
        assert len(arrival_times(kind, rate, duration, seed=1)) == count


def test_uniform_arrivals_are_evenly_spaced_from_zero() -> None:
    assert uniform_arrivals(4, 2.0) == [0.0, 0.5, 1.0, 1.5]


def test_poisson_arrivals_are_pinned_by_the_seed() -> None:
    times = poisson_arrivals(4, 10.0, seed=7)
    assert [round(time, 9) for time in times] == [3.382335232, 6.404299065, 6.561707722, 8.105603419]
    assert poisson_arrivals(100, 10.0, seed=7) == poisson_arrivals(100, 10.0, seed=7)
    assert poisson_arrivals(100, 10.0, seed=7) != poisson_arrivals(100, 10.0, seed=8)


def test_poisson_arrivals_ascend_within_the_duration() -> None:
    times = poisson_arrivals(5000, 100.0, seed=3)
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 100.0


def test_poisson_gaps_are_exponential() -> None:
    times = poisson_arrivals(20_000, 2000.0, seed=3)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = math.fsum(gaps) / len(gaps)
    deviation = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.1, rel=0.01)
    assert deviation == pytest.approx(mean, rel=0.03)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.01)
