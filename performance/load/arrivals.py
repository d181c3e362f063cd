"""Calculates when requests are due, in seconds from the start. Equal seeds give equal times on every machine."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

ARRIVALS = ("poisson", "uniform")


def request_count(rate: float, duration: float) -> int:
    """Returns the number of requests of a run: ``rate * duration``, rounded."""
    return round(rate * duration)


def arrival_times(kind: str, rate: float, duration: float, seed: int) -> list[float]:
    """Returns the due times of a run's requests, in seconds from 0 to ``duration``."""
    count = request_count(rate, duration)
    if kind == "poisson":
        return poisson_arrivals(count, duration, seed)
    return uniform_arrivals(count, duration)


def uniform_arrivals(count: int, duration: float) -> list[float]:
    """Returns ``count`` evenly spaced times within ``duration``. The first time is 0."""
    return [index * duration / count for index in range(count)]


def poisson_arrivals(count: int, duration: float, seed: int) -> list[float]:
    """Returns the times of a Poisson process that has exactly ``count`` arrivals within ``duration``.

    The times are sums of ``count + 1`` exponential gaps, scaled to fill the duration. This is the exact distribution of
    the process (order statistics of uniform times; Devroye, "Non-Uniform Random Variate Generation", 1986, V.2.2). The
    bursts are random, but the number of requests is fixed.
    """
    gaps = list(_exponential_gaps(count + 1, seed))
    scale = duration / math.fsum(gaps)
    times = []
    now = 0.0
    for gap in gaps[:count]:
        now += gap * scale
        times.append(now)
    return times


def _exponential_gaps(count: int, seed: int) -> Iterator[float]:
    generator = random.Random(f"arrivals/{seed}")
    for _ in range(count):
        yield -math.log(1.0 - generator.random())
