"""When requests are due: seconds from the start of the run, ascending, the same for the same seed everywhere."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

ARRIVALS = ("poisson", "uniform")


def request_count(rate: float, duration: float) -> int:
    """Requests of a run: ``rate * duration``, rounded."""
    return round(rate * duration)


def arrival_times(kind: str, rate: float, duration: float, seed: int) -> list[float]:
    """``request_count(rate, duration)`` due times in [0, duration)."""
    count = request_count(rate, duration)
    if kind == "poisson":
        return poisson_arrivals(count, duration, seed)
    return uniform_arrivals(count, duration)


def uniform_arrivals(count: int, duration: float) -> list[float]:
    """Evenly spaced, the first at 0."""
    return [index * duration / count for index in range(count)]


def poisson_arrivals(count: int, duration: float, seed: int) -> list[float]:
    """A Poisson process of which is known that it has ``count`` arrivals within ``duration``.

    ``count + 1`` exponential gaps, scaled so that they fill the duration: that is the exact distribution of such a
    process (order statistics of uniform times; Devroye, "Non-Uniform Random Variate Generation", 1986, V.2.2), so the
    load is random in its bursts and exact in its amount.
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
