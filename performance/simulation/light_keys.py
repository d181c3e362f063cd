"""Simulates light API keys during a flood from other keys: ``python -m performance.simulation.light_keys``.

A light key sends few requests, and a heavy key sends many. The loads and objectives are those of
``performance/bench_overload.py``. First the light keys send alone. Then four heavy keys also send, together ten times
the deployment's peak rate. The table has a row for each deployment, with and without
``scheduler_config.light_keys_first``. A run takes a minute, and gives the same result on every machine.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.telemetry.statistics import percentile
from performance.load.stream import RequestRecord
from performance.simulation.requests import some_tokens
from performance.simulation.server import VirtualServer
from performance.simulation.setup import Setup, make_setup
from performance.simulation.workload import OpenLoop, SimulatedRequest
from performance.terminal import format_number, format_table

__all__ = ["CASES", "Case", "Figures", "simulate_flood"]

TTFT_S, TPOT_S = 1.0, 0.1
"""Objectives of the requests in seconds: time to first token, and time per output token."""
FACTOR = 10.0
"""Rate of all heavy keys together, as a multiple of the peak rate."""
LIGHT_KEYS, LIGHT_SHARE = 2, 0.05
"""Number of light keys, and the rate of all light keys together as a fraction of the peak rate."""
HEAVY_KEYS = 4
"""Number of heavy keys."""
SETTLE_S = 2.0
"""Seconds at the start that are not measured."""
SETTINGS = (
    "scheduler_config.policy=slo",
    f"scheduler_config.ttft_objective_ms={1000 * TTFT_S:g}",
    f"scheduler_config.tbt_objective_ms={1000 * TPOT_S:g}",
    "scheduler_config.max_waiting_requests=64",
)
INT8 = ("model_config.weight_format=int8", "model_config.kv_format=int8")


@dataclass(frozen=True, slots=True)
class Case:
    """A deployment, and its ``peak_rate``: the rate with the largest goodput, in requests per second."""

    config: str
    device: str
    peak_rate: float
    settings: tuple[str, ...] = ()

    def setup(self) -> Setup:
        return make_setup(self.config, [*self.settings, *SETTINGS], self.device)


CASES = (
    Case("llama_tiny_cpu.yaml", "cpu", 50.0),
    Case("llama_160m_cpu.yaml", "cpu", 7.5, INT8),
    Case("llama_7b_kbk_pa_dyn.yaml", "ascend-910b", 23.0),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of one case, over the runs of all seeds.

    ``alone_ms`` and ``flood_ms``: 99th percentile of the light keys' time to first token, without and with the flood.
    ``goodput`` and ``peak_goodput``: requests per second that meet both objectives, during the flood and with the peak
    load.
    """

    alone_ms: float
    flood_ms: float
    goodput: float
    peak_goodput: float

    @property
    def ratio(self) -> float:
        """The 99th percentile of the light keys' time to first token, as a multiple of the value without the flood."""
        return self.flood_ms / self.alone_ms


def simulate_flood(case: Case, seeds: Sequence[int], seconds: float, *, light_keys_first: bool) -> Figures:
    """Simulates three loads of ``seconds`` each, for each seed.

    The light keys are API keys with few requests. The loads are the light keys alone, the light keys during a flood of
    requests from other keys, and one key with the peak load. ``light_keys_first`` is the setting of the scheduler.
    """
    setup = case.setup()
    limits = replace(setup.limits, light_keys_first=light_keys_first)
    light = {f"light-{index}": LIGHT_SHARE * case.peak_rate / LIGHT_KEYS for index in range(LIGHT_KEYS)}
    heavy = {f"heavy-{index}": FACTOR * case.peak_rate / HEAVY_KEYS for index in range(HEAVY_KEYS)}
    alone: list[float] = []
    flood: list[float] = []
    goodputs, peaks = [], []
    for seed in seeds:
        alone += _ttfts_ms(_run(limits, setup, light, seconds, seed))
        records = _run(limits, setup, {**heavy, **light}, seconds, seed)
        flood += _ttfts_ms(records)
        goodputs.append(_goodput(records, seconds))
        peaks.append(_goodput(_run(limits, setup, {"peak": case.peak_rate}, seconds, seed), seconds))
    mean, peak = sum(goodputs) / len(goodputs), sum(peaks) / len(peaks)
    return Figures(percentile(sorted(alone), 99), percentile(sorted(flood), 99), mean, peak)


def _run(
    limits: SchedulerLimits, setup: Setup, rates: dict[str, float], seconds: float, seed: int
) -> list[tuple[str, RequestRecord]]:
    """Returns the key and the record of each request. ``rates``: requests per second by key (Poisson processes)."""
    arrivals: list[tuple[float, SimulatedRequest]] = []
    for key, rate in rates.items():
        generator = random.Random(f"{key}/{seed}")
        time = generator.expovariate(rate)
        while time < seconds:
            prompt, output = generator.randint(128, 384), generator.randint(32, 128)
            arrivals.append((time, SimulatedRequest(some_tokens(prompt, generator), output, output, tenant=key)))
            time += generator.expovariate(rate)
    arrivals.sort(key=_time)
    requests = [request for _, request in arrivals]
    source = OpenLoop(requests, [time for time, _ in arrivals])
    outcome = VirtualServer(limits, setup.device, source, setup.host, setup.spread, seed).run()
    return [(request.tenant, record) for request, record in zip(requests, outcome.records, strict=True)]


def _time(arrival: tuple[float, SimulatedRequest]) -> float:
    return arrival[0]


def _ttfts_ms(records: Sequence[tuple[str, RequestRecord]]) -> list[float]:
    return [
        1e3 * (record.piece_times[0] - record.due)
        for key, record in records
        if key.startswith("light") and record.piece_times
    ]


def _goodput(records: Sequence[tuple[str, RequestRecord]], seconds: float) -> float:
    """Returns the requests per second that meet both objectives and end between ``SETTLE_S`` and ``seconds``."""
    num_good = 0
    for _, record in records:
        if record.failure is None and record.end is not None and SETTLE_S <= record.end <= seconds:
            first = record.piece_times[0]
            per_token = (record.end - first) / max(record.output_tokens - 1, 1)
            num_good += first - record.due <= TTFT_S and per_token <= TPOT_S
    return num_good / (seconds - SETTLE_S)


def main() -> int:
    """Prints the table of all cases. Returns 0."""
    rows = []
    for case in CASES:
        for on in (False, True):
            figures = simulate_flood(case, range(5), 60.0, light_keys_first=on)
            print(f"  {case.config}, {'with' if on else 'without'} light_keys_first", file=sys.stderr)
            numbers = (figures.alone_ms, figures.flood_ms, figures.ratio, figures.goodput / figures.peak_goodput)
            rows.append([case.config, "true" if on else "false", *map(format_number, numbers)])
    columns = ["", "light_keys_first", "alone p99 ms", "flood p99 ms", "ratio", "goodput / peak"]
    print(format_table(columns, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
