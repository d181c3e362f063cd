"""Scales the time limits of tests to the speed and the load of the machine.

A limit only ends a test that hangs, so it may be generous. A fixed limit fails on a slow or busy machine.
"""

from __future__ import annotations

import os
import time
from functools import cache

REFERENCE_SECONDS = 0.011
"""Processor time of ``_fixed_work`` on the machine for which the limits in the tests were chosen."""
MAX_FACTOR = 12.0


def time_limit(seconds: float) -> float:
    """Returns ``seconds`` times a factor for this machine: its processor's speed and the load on it now.

    The environment variable ``LLM_TEST_TIME_FACTOR`` replaces the measured factor.
    """
    if (given := os.environ.get("LLM_TEST_TIME_FACTOR")) is not None:
        return seconds * float(given)
    waiting = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return seconds * min(MAX_FACTOR, _slowness() * (1.0 + waiting))


@cache
def _slowness() -> float:
    """Returns how many times slower a processor of this machine is than the reference, at least 1.

    The time in which this process waits for a processor does not count.
    """
    return max(1.0, min(_fixed_work() for _ in range(3)) / REFERENCE_SECONDS)


def _fixed_work() -> float:
    begun = time.process_time()
    total = 0
    for number in range(300_000):
        total += number % 7
    return time.process_time() - begun
