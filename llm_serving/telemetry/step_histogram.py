"""A Prometheus histogram for values of each step, which needs no lock.

To record one value, the histograms of ``prometheus_client`` take two locks and make three more calls. The engine thread
records several values for each step. During this time, the device may be idle, so the recording must be fast.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class StepSeries:
    """The counts of a histogram for one value of its label."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """The number of observations in each bucket, without those in smaller buckets. The last bucket has no bound."""
        self.total = 0.0
        """The sum of all observations."""

    def observe(self, value: float) -> None:
        """Counts a value. Several threads may call this method: each model and each version has an engine thread.

        No lock is needed. CPython switches between threads only at calls and at the end of a loop iteration. Here, no
        call is between reading a number and writing its new value.
        """
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class StepHistogram(Collector):
    """A histogram with a series for each value of one label, or with a single series."""

    def __init__(
        self, name: str, meaning: str, bounds: Sequence[float], label: str = "", kinds: Sequence[str] = ("",)
    ) -> None:
        """``bounds`` are the inclusive upper bounds of the buckets, in ascending order. ``kinds`` are the values of
        ``label``.
        """
        self._family, self._meaning, self._labels = name, meaning, [label] if label else []
        self._bounds = [*map(floatToGoString, bounds), "+Inf"]
        self.series = {kind: StepSeries(bounds) for kind in kinds}

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._family, self._meaning, labels=self._labels)
        for kind, series in self.series.items():
            # Another thread may observe a value meanwhile. A copy keeps the buckets and their number consistent.
            counts = list(accumulate(series.counts.copy()))
            buckets = list(zip(self._bounds, counts, strict=True))
            family.add_metric([kind] if self._labels else [], buckets, series.total)
        yield family
