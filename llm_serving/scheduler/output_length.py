"""How long an answer will be, from the answers that ended lately.

Requests that ask for about as many tokens (the same power of two) look alike: of each such group the last
``WINDOW`` lengths are kept. The prediction is a quantile of those that are longer than what the request has
already: what is known of it can only raise it. Where too few were that long, the answer is as long as it may be,
which errs on the safe side. ("Past-Future Scheduler", Gong et al., ASPLOS 2025, predicts from the same history.)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from math import ceil

__all__ = ["MIN_SAMPLES", "WINDOW", "OutputLengthPredictor"]

WINDOW = 1024
"""Lengths kept of each group."""

MIN_SAMPLES = 16
"""Lengths that must be longer than what a request has, or its prediction is what it asks for."""


class OutputLengthPredictor:
    """Pure and deterministic: the same lengths in the same order give the same predictions. O(log WINDOW)."""

    def __init__(self, quantile: float = 0.9, window: int = WINDOW, min_samples: int = MIN_SAMPLES) -> None:
        if not 0.0 < quantile <= 1.0:
            raise ValueError(f"quantile is {quantile}; it must be more than 0 and at most 1")
        self._quantile = quantile
        self._window = window
        self._min_samples = min_samples
        self._groups: dict[int, _Lengths] = {}

    def observe(self, num_output_tokens: int, max_output_tokens: int) -> None:
        """A request that could have ``max_output_tokens`` ended by itself after ``num_output_tokens``."""
        group = max_output_tokens.bit_length()
        self._groups.setdefault(group, _Lengths(self._window)).add(num_output_tokens)

    def predict(self, num_output_tokens: int, max_output_tokens: int) -> int:
        """Output tokens, in all, of a request that has ``num_output_tokens`` and is not over: more than those, and
        at most ``max_output_tokens``."""
        lengths = self._groups.get(max_output_tokens.bit_length())
        if lengths is None:
            return max_output_tokens
        longer = lengths.longer_than(num_output_tokens)
        if longer < self._min_samples:
            return max_output_tokens
        return min(lengths.quantile_of_longest(longer, self._quantile), max_output_tokens)


class _Lengths:
    """The last lengths of a group, in order of arrival and sorted."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, length: int) -> None:
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > self._window:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def longer_than(self, length: int) -> int:
        return len(self._sorted) - bisect_right(self._sorted, length)

    def quantile_of_longest(self, count: int, quantile: float) -> int:
        """The least of the ``count`` longest that a share of ``quantile`` of them does not exceed."""
        return self._sorted[len(self._sorted) - count + ceil(count * quantile) - 1]
