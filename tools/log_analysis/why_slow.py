"""Explains slow requests: compares the parts of their time with typical requests, and finds requests that delayed them.

Slow requests are the slowest 1 % of the completed requests (at least 5 requests, at most half of all). Typical requests
have a total time between the 40th and the 60th percentile. A request's time is divided into parts, such as queue and
decode. The means of the parts add up to the mean total time, because all means are over the same requests.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from llm_serving.request import PARTS
from tools.log_analysis.records import RequestEnd

SLOW_SHARE = 0.01
"""Fraction of the requests that count as slow."""
MIN_SLOW = 5
"""Minimum number of requests that count as slow. In a short log, at most half of the requests are slow."""
MAX_SLOW = 2000
"""Maximum number of slow requests that are stored: 1 % of 200 000."""
MAX_SAMPLE = 100_000
"""Maximum number of requests in the sample from which typical requests are taken.

A log with more requests is sampled: every second request, then every fourth, and so on.
"""
TOP_BLOCKERS = 5
"""Maximum number of blocking requests that are listed."""

_COLUMNS = ("e2e", *PARTS, "output_tokens")


@dataclass(frozen=True, slots=True)
class Composition:
    """Mean times of the slow requests or of the typical requests, in milliseconds. ``parts`` add up to ``e2e``."""

    count: int
    e2e: float
    parts: dict[str, float]
    output_tokens: float

    @property
    def per_token(self) -> float | None:
        """Milliseconds of decode per output token. None without output tokens."""
        return self.parts["decode"] / self.output_tokens if self.output_tokens else None


@dataclass(frozen=True, slots=True)
class Blocker:
    """A request that blocked slow requests."""

    request_id: str
    requests: int
    """Number of slow requests that the blocking request delayed."""


@dataclass(frozen=True, slots=True)
class SlowRequests:
    """The comparison of slow requests with typical requests: mean times, waits, blockers and preemptions."""

    typical: Composition
    slow: Composition
    blocked_ms: dict[str, float]
    """Mean milliseconds that a slow request waited while the first request in the queue could not start, by reason."""
    blockers: list[Blocker]
    preemptions: float
    """Mean number of preemptions of a slow request. ``swaps`` counts only preemptions that swap to host memory."""
    swaps: float

    @property
    def excess(self) -> dict[str, float]:
        """Additional milliseconds of each part compared with a typical request, the largest first."""
        more = {part: self.slow.parts[part] - self.typical.parts[part] for part in PARTS}
        return dict(sorted(more.items(), key=lambda entry: -entry[1]))


@dataclass(slots=True)
class WhySlow:
    """Collects completed requests in bounded memory, to compare slow requests with typical ones."""

    count: int = 0
    _stride: int = 1
    _sample: array[float] = field(default_factory=lambda: array("d"))
    _slowest: list[tuple[float, int, RequestEnd]] = field(default_factory=list)

    def add(self, end: RequestEnd) -> None:
        """Adds a completed request. A request without a total time is ignored."""
        if end.e2e_ms is None:
            return
        entry = (end.e2e_ms, -self.count, end)
        if len(self._slowest) < MAX_SLOW:
            heapq.heappush(self._slowest, entry)
        else:
            heapq.heappushpop(self._slowest, entry)
        if self.count % self._stride == 0:
            self._sample.extend((end.e2e_ms, *end.parts.values(), float(end.output_tokens)))
            self._thin_out()
        self.count += 1

    def result(self) -> SlowRequests | None:
        """Returns the comparison, or None for fewer than two requests."""
        if self.count < 2:
            return None
        wanted = max(round(self.count * SLOW_SHARE), MIN_SLOW)
        slow = [end for _, _, end in heapq.nlargest(min(wanted, self.count // 2), self._slowest)]
        return SlowRequests(
            typical=self._typical(),
            slow=_composition([_row(end) for end in slow]),
            blocked_ms=_blocked(slow),
            blockers=_blockers(slow),
            preemptions=sum(end.preemptions for end in slow) / len(slow),
            swaps=sum(end.swaps for end in slow) / len(slow),
        )

    def _typical(self) -> Composition:
        width = len(_COLUMNS)
        rows = [self._sample[start : start + width] for start in range(0, len(self._sample), width)]
        rows.sort(key=lambda row: row[0])
        first, last = 2 * len(rows) // 5, -(-3 * len(rows) // 5)
        return _composition(rows[first:last])

    def _thin_out(self) -> None:
        width = len(_COLUMNS)
        if len(self._sample) < MAX_SAMPLE * width:
            return
        kept = array("d")
        for start in range(0, len(self._sample), 2 * width):
            kept.extend(self._sample[start : start + width])
        self._sample = kept
        self._stride *= 2


def _row(end: RequestEnd) -> Sequence[float]:
    return (end.e2e_ms or 0.0, *end.parts.values(), float(end.output_tokens))


def _composition(rows: Sequence[Sequence[float]]) -> Composition:
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return Composition(len(rows), means[0], dict(zip(PARTS, means[1:-1], strict=True)), means[-1])


def _blocked(slow: Sequence[RequestEnd]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for end in slow:
        total.update(end.blocked_ms)
    return {reason: milliseconds / len(slow) for reason, milliseconds in total.most_common() if milliseconds}


def _blockers(slow: Sequence[RequestEnd]) -> list[Blocker]:
    """Returns the requests that blocked the largest numbers of slow requests. Equal numbers are sorted by id."""
    seen = Counter(request_id for end in slow for request_id in dict.fromkeys(end.blocked_by))
    ranked = sorted(seen.items(), key=lambda entry: (-entry[1], entry[0]))
    return [Blocker(request_id, requests) for request_id, requests in ranked[:TOP_BLOCKERS]]
