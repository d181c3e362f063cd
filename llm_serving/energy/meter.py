"""Reports energy and processor time per generated token, in the log and in the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llm_serving.energy.processes import ProcessTimes
from llm_serving.energy.rapl import RaplZone, open_zones
from llm_serving.telemetry.log import EventLog


@dataclass(frozen=True, slots=True)
class Reading:
    """Tokens, processor time and energy, each as the sum since the start of the meter."""

    tokens: float
    """Output tokens of requests that have ended."""
    cpu_seconds: float
    """Processor time of the server and of its agents on the same machine."""
    joules: float | None
    """Energy of all processors and the memory of the machine. None if the machine has no readable counter."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The tokens, processor time and energy between two readings."""

    tokens: int
    cpu_seconds: float
    joules: float | None

    @classmethod
    def between(cls, before: Reading, after: Reading) -> Interval:
        joules = None if after.joules is None or before.joules is None else after.joules - before.joules
        return cls(round(after.tokens - before.tokens), after.cpu_seconds - before.cpu_seconds, joules)

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the log event ``energy``. ``tokens`` must be above 0."""
        joules = None if self.joules is None else round(self.joules, 3)
        return {
            "output_tokens": self.tokens,
            "cpu_s": round(self.cpu_seconds, 3),
            "cpu_s_per_1000_tokens": round(1000 * self.cpu_seconds / self.tokens, 3),
            "joules": joules,
            "joules_per_1000_tokens": None if joules is None else round(1000 * joules / self.tokens, 3),
        }


class EnergyMeter(Collector):
    """Reads the counters, logs the event ``energy`` and collects metrics.

    ``tokens`` returns the number of output tokens of all requests that have ended.
    """

    def __init__(self, tokens: Callable[[], float], zones: Sequence[RaplZone] | None = None) -> None:
        self._tokens = tokens
        self._zones = open_zones() if zones is None else zones
        self._times = ProcessTimes()
        self._start_s = self._times.seconds()
        self._last = self.read()
        self._interval: Interval | None = None

    def read(self) -> Reading:
        """Returns the tokens, the processor seconds and the energy since the start of the meter."""
        joules = sum(zone.joules() for zone in self._zones) if self._zones else None
        return Reading(self._tokens(), self._times.seconds() - self._start_s, joules)

    def end_interval(self) -> Interval | None:
        """Returns the interval since the end of the last returned interval, or None if it has no output tokens.

        Only tokens of ended requests count. If the result is None, the next interval also includes the time and the
        energy of this interval, because an idle server uses energy, too.
        """
        now = self.read()
        interval = Interval.between(self._last, now)
        if interval.tokens <= 0:
            return None
        self._last, self._interval = now, interval
        return interval

    async def report(self, log: EventLog, interval_s: float) -> None:
        """Logs the event ``energy`` every ``interval_s`` seconds, unless no request has ended meanwhile. Never returns.
        """
        while True:
            await asyncio.sleep(interval_s)
            if (interval := self.end_interval()) is not None:
                log.event("energy", **interval.fields())

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        now = self.read()
        yield CounterMetricFamily(
            "llm_serving_cpu_seconds",
            "Processor time of the server and of its agents on the same machine. Agents on other nodes do not count.",
            value=now.cpu_seconds,
        )
        if now.joules is not None:
            yield CounterMetricFamily(
                "llm_serving_energy_joules",
                "Energy of the processors and the memory of this machine, from RAPL. Absent if it cannot be read.",
                value=now.joules,
            )
        if self._interval is not None:
            yield from _per_1000_tokens(self._interval)


def _per_1000_tokens(interval: Interval) -> Iterable[Metric]:
    yield GaugeMetricFamily(
        "llm_serving_cpu_seconds_per_1000_tokens",
        "Processor time for 1000 output tokens in the last interval of the event energy.",
        value=1000 * interval.cpu_seconds / interval.tokens,
    )
    if interval.joules is not None:
        yield GaugeMetricFamily(
            "llm_serving_energy_joules_per_1000_tokens",
            "Energy for 1000 output tokens in the last interval of the event energy.",
            value=1000 * interval.joules / interval.tokens,
        )
