"""Defines and computes latency statistics, for the load test (client side) and the log analysis (server side).

start              time at which the client wrote, or the server read, the request's first byte. So the server's
                   latencies do not include the network. If the load test sends a request too late, the latencies do
                   not include this delay, which is reported separately
ttft               time to first token: start to the first output, read (client) or written to the socket (server)
tpot               time per output token: (last output - first output) / (output tokens - 1); none for fewer than 2
tbt                time between tokens: one value for every two consecutive pieces of a response
e2e                start to the end of the response, read (client) or written (server)
normalized latency e2e / output tokens (Orca, OSDI 2022; vLLM, SOSP 2023)
percentile         linear interpolation between the two nearest ranks, NumPy's default
                   (type 7 of Hyndman and Fan, "Sample quantiles in statistical packages", 1996)
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

EXACT_LIMIT = 500_000
"""Number of values that a ``Distribution`` keeps before it uses buckets. These values take 4 MB."""
RELATIVE_ERROR = 0.001
"""Maximum error of a percentile from buckets, relative to its value."""
SMALLEST = 1e-9
"""Largest value that counts as zero. Zero needs a bucket of its own, because it has no logarithm."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary of a set of values. For an empty set, all figures except ``count`` are None."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    min: float | None
    max: float | None

    def as_dict(self) -> dict[str, float | int | None]:
        return asdict(self)


EMPTY_SUMMARY = Summary(0, None, None, None, None, None, None, None)


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """Returns the percentile ``percent`` (0 to 100): 50 gives the median. Interpolates linearly between two values.

    ``sorted_values`` must be ascending and not empty.
    """
    rank = (len(sorted_values) - 1) * percent / 100.0
    lower = math.floor(rank)
    upper = min(lower + 1, len(sorted_values) - 1)
    return sorted_values[lower] + (sorted_values[upper] - sorted_values[lower]) * (rank - lower)


def summarize(values: Iterable[float]) -> Summary:
    """Returns the exact summary of ``values``, which may have any order."""
    ordered = sorted(values)
    if not ordered:
        return EMPTY_SUMMARY
    return Summary(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
        min=ordered[0],
        max=ordered[-1],
    )


def time_per_output_token(first_token: float, last_token: float, output_tokens: int) -> float | None:
    """Returns the mean time between tokens, in the unit of the two times. None for fewer than two tokens."""
    if output_tokens < 2:
        return None
    return (last_token - first_token) / (output_tokens - 1)


def normalized_latency(e2e: float, output_tokens: int) -> float | None:
    """Returns the end-to-end latency per output token, in the unit of ``e2e``. None without a token."""
    if output_tokens < 1:
        return None
    return e2e / output_tokens


class Distribution:
    """Collects values in bounded memory and summarises them.

    The summary is exact for the first ``exact_limit`` values. With more values, they move to logarithmic buckets
    (DDSketch, Masson et al., VLDB 2019). The relative error of a percentile is then at most ``RELATIVE_ERROR``. Count,
    mean, minimum and maximum stay exact.
    """

    def __init__(self, exact_limit: int = EXACT_LIMIT) -> None:
        self._exact_limit = exact_limit
        self._values = array("d")
        self._buckets: dict[int, int] = {}
        self._zeros = 0
        self._log_gamma = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))
        self._sum = 0.0
        self._min = math.inf
        self._max = -math.inf
        self.count = 0

    @property
    def is_exact(self) -> bool:
        return not self._buckets and not self._zeros

    def add(self, value: float) -> None:
        self.count += 1
        self._sum += value
        self._min = min(self._min, value)
        self._max = max(self._max, value)
        if not self.is_exact:
            self._add_to_bucket(value)
            return
        self._values.append(value)
        if len(self._values) > self._exact_limit:
            for kept in self._values:
                self._add_to_bucket(kept)
            self._values = array("d")

    def extend(self, values: Sequence[float]) -> None:
        """Adds several values. This is faster than calling ``add`` for each of them."""
        if not values or not self.is_exact or len(self._values) + len(values) > self._exact_limit:
            for value in values:
                self.add(value)
            return
        self.count += len(values)
        self._sum += math.fsum(values)
        self._min = min(self._min, min(values))
        self._max = max(self._max, max(values))
        self._values.extend(values)

    def summary(self) -> Summary:
        if self.is_exact:
            return summarize(self._values)
        return Summary(
            count=self.count,
            mean=self._sum / self.count,
            p50=self._bucket_percentile(50),
            p90=self._bucket_percentile(90),
            p95=self._bucket_percentile(95),
            p99=self._bucket_percentile(99),
            min=self._min,
            max=self._max,
        )

    def _add_to_bucket(self, value: float) -> None:
        if value <= SMALLEST:
            self._zeros += 1
            return
        bucket = math.ceil(math.log(value) / self._log_gamma)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def _bucket_percentile(self, percent: float) -> float:
        rank = (self.count - 1) * percent / 100.0
        lower = self._bucket_value(math.floor(rank))
        return lower + (self._bucket_value(math.ceil(rank)) - lower) * (rank - math.floor(rank))

    def _bucket_value(self, rank: int) -> float:
        """Returns the approximate value at index ``rank``, from 0, of all values in ascending order."""
        seen = self._zeros
        if seen > rank:
            return max(self._min, 0.0)
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen > rank:
                middle = math.exp(bucket * self._log_gamma) * (1 - RELATIVE_ERROR)
                return min(max(middle, self._min), self._max)
        return self._max
