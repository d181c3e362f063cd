"""Measures how a server behaves under a load that is many times larger than the load it can serve.

The program starts a server with several API keys. Light keys send a few requests per second. Heavy keys send the
overload. The goodput is the number of requests per second that meet their objectives. First the program searches for
the request rate with the largest goodput, the rate of the peak. It doubles the rate until the goodput is clearly below
the rate. Then it measures several rates around this goodput. Few responses end at the beginning of a load. So the
goodput leaves out at least two seconds, and as many as a response takes.

The largest of several measured goodputs is too large on average, because chance has raised it. So the search only
finds the rate. Then --rounds rounds follow, each with three loads of --duration seconds:

  peak      One key sends requests at the rate of the peak. Measures the goodput again.
  overload  Four heavy keys and the light keys send requests. Measures the goodput and the latencies. Together the
            heavy keys send --factor times the rate of the peak. Three of them exceed their quotas. The fourth has no
            quota, so its requests are refused only if the queue of waiting requests is full.
  alone     Only the light keys send requests, the same ones as under overload. Measures their latencies.

The peak is the first load in every second round, and the last load in the others. The load "alone" always follows the
overload. The reason: the server keeps batch rows free for light keys for 30 seconds after an overload. A peak that is
measured in this time would be too low. During the overload, the program also measures the memory of all processes of
the server.

There are four goals. The exit code is 1 if one of them is missed:

  goodput         in the median round, the goodput under overload is at least 95 % of the peak of this round
  refusals        the 99th percentile of the time to a refusal (429) is at most 20 ms
  light_ttft      the 99th percentile of the light keys' time to first token is at most 1.5 times the value of "alone"
  light_refused   no request of a light key is refused

Times count from the write of a request to the arrival of the response in the kernel. Client and server share the
machine. The report therefore shows which fraction of the processor time the client used, and which fraction a
hypervisor took.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from llm_serving.access.keys import digest_of, new_secret
from llm_serving.telemetry.statistics import percentile
from performance.load.client import discover_model
from performance.load.endpoint import Endpoint
from performance.load.flood import FloodRun, KeyLoad, Lengths, Result, run_flood
from performance.load.server_process import START_SERVER, configured_server
from performance.load.watches import children_mib, sampled
from performance.program import (
    EXIT_FAILURES,
    LoadTestError,
    exits_with_errors,
    new_parser,
    parse_count,
    parse_range,
    positive,
    write_json,
)
from performance.terminal import format_number, format_table

PERCENTS = (("p50", 50), ("p99", 99), ("p99.9", 99.9), ("max", 100))
MEMORY_INTERVAL_S = 1.0
"""Seconds between two readings of the server's memory."""
SETTLE_S = 2.0
"""Minimum seconds at the start of a load that are left out of its goodput."""
SETTLES_PER_LOAD = 4
"""Minimum duration of a load of the search, as a multiple of the seconds that are left out of its goodput."""
KEY_FILE_TIMEOUT_S = 20.0
"""Maximum seconds until the server has read the new key file."""
LIGHT_KEYS = 2
"""Number of API keys with few requests."""
HEAVY_KEYS = ("requests", "tokens", "in-flight", "open")
"""Heavy keys, named by the quota that they exceed. ``open`` has no quota."""
QUOTA_SHARE = 0.1
"""Quota per minute of a heavy key, as a fraction of the peak goodput."""
QUOTA_IN_FLIGHT = 8
"""Quota of the heavy key ``in-flight``: its maximum number of requests in flight."""
READER = "reader"
"""A key that sends no load. The changed key file denies this key all models. So the list of models that the key gets
shows when the server has read the file.
"""
PEAK_STEPS = (0.85, 1.0, 1.15, 1.3)
"""The request rates that are measured to find the peak of the goodput, as multiples of a first estimate.

The estimate is the goodput at the first rate that the server cannot keep up with (see ``KEPT_SHARE``).
"""
MAX_FURTHER_STEPS = 4
"""Maximum number of rates above those of ``PEAK_STEPS`` that are measured while the goodput still grows."""
KEPT_SHARE = 0.9
"""The search for the peak stops doubling the rate when the goodput is below this fraction of the rate."""
MIN_GOODPUT_SHARE = 0.95
"""Minimum share of the peak goodput that the server must keep during an overload."""
MAX_REFUSAL_MS = 20.0
"""Maximum 99th percentile of the time until a request is refused, in milliseconds."""
MAX_LIGHT_TTFT_RATIO = 1.5
"""Maximum 99th percentile of the light keys' time to first token under overload, divided by the one of the load
``alone``."""
LIGHT_SEED = 500_000
"""Added to the seed for the loads ``alone`` and ``overload``. The light keys must send the same requests in both."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The API keys of the measurement, in a key file that the server reads again after each change."""

    file: Path
    secrets: dict[str, str]

    @classmethod
    def new(cls, file: Path) -> Keys:
        names = ["peak", READER, *(f"light-{i}" for i in range(LIGHT_KEYS)), *(f"heavy-{name}" for name in HEAVY_KEYS)]
        keys = cls(file, {name: new_secret() for name in names})
        keys.write({})
        return keys

    def write(self, rights: dict[str, str]) -> None:
        """Writes the key file. ``rights`` maps names of keys to their limits. A key without an entry has no limits."""
        digests = {name: digest_of(secret).hex() for name, secret in self.secrets.items()}
        lines = [f"{name} sha256:{digest} {rights.get(name, '')}" for name, digest in digests.items()]
        self.file.touch(mode=0o600)
        self.file.write_text("\n".join(lines) + "\n")

    def load(self, name: str, rate: float) -> KeyLoad:
        return KeyLoad(name, self.secrets[name], rate)


@exits_with_errors
def main(arguments: Sequence[str] | None = None, program: Path = START_SERVER) -> int:
    """Runs the measurement and returns the exit code.

    0: success. 1: a goal is missed. 2: the server did not start, or a request failed other than by a refusal.
    """
    parsed = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench_overload_") as folder:
        keys = Keys.new(Path(folder) / "keys.txt")
        settings = [
            "scheduler_config.policy=slo",
            f"scheduler_config.ttft_objective_ms={parsed.slo_ttft_ms:g}",
            f"scheduler_config.tbt_objective_ms={parsed.slo_tpot_ms:g}",
            f"scheduler_config.max_waiting_requests={parsed.max_waiting}",
            f"serving_config.api_keys_file={keys.file}",
            # The light keys send the same prompts in the loads "alone" and "overload". With a cache, the second load
            # would be cheaper.
            "scheduler_config.prefix_cache=false",
            *parsed.settings,
        ]
        print("starting the server", file=sys.stderr)
        server = configured_server("overload", parsed.config, settings, Path(folder), parsed.start_timeout, program)
        with server as endpoint:
            results = Study(parsed, endpoint, keys).run()
    print(_text(results))
    write_json(parsed.json, results)
    return 0 if all(goal["pass"] for goal in results["goals"].values()) else EXIT_FAILURES


@dataclass(frozen=True, slots=True)
class Round:
    """The three loads of a round, the memory of the server during the overload, and the time that a hypervisor took."""

    peak: FloodRun
    overload: FloodRun
    alone: FloodRun
    memory_mib: list[float]
    stolen_share: float


class Study:
    """Runs the loads of one measurement, one after the other."""

    _settle_s = SETTLE_S
    """Seconds at the start of a load that are left out of its goodput: as long as almost every response takes.

    Before this time, fewer responses end than the server can complete in the long run.
    """

    def __init__(self, parsed: argparse.Namespace, endpoint: Endpoint, keys: Keys) -> None:
        self._parsed = parsed
        self._endpoint = endpoint
        self._keys = keys
        self._model = discover_model(endpoint, {"Authorization": f"Bearer {keys.secrets['peak']}"})
        self._lengths = Lengths(parsed.prompt_len, parsed.output_len)
        self._num_loads = 0

    def run(self) -> dict[str, Any]:
        """Sends the loads of the benchmark and returns its figures as a JSON object."""
        parsed = self._parsed
        self._warm_up()
        rows = self._peak_rows()
        best = max(rows, key=lambda row: float(row["goodput_per_s"]))
        self._limit_heavy_keys(best["goodput_per_s"])
        rounds = [self._round(number, best["rate"]) for number in range(parsed.rounds)]
        figures = self._figures(rounds)
        memory = [sample for each in rounds for sample in each.memory_mib]
        third = max(1, len(memory) // 3)
        floods = [each.overload for each in rounds]
        lateness = sorted(late for flood in floods for late in flood.lateness_ms)
        return {
            "rates": rows,
            "peak_rate": best["rate"],
            "overload_rate": parsed.factor * best["rate"],
            "overload_duration_s": parsed.duration,
            **figures,
            **_counts([one for flood in floods for one in flood.results]),
            "client_lateness_ms": _percentiles(lateness),
            "client_cpu_share": sum(flood.client_cpu_s for flood in floods) / (parsed.duration * len(floods)),
            "stolen_share": statistics.mean(each.stolen_share for each in rounds),
            "memory_mib": {
                "start": memory[0], "first_third": max(memory[:third]), "last_third": max(memory[-third:])
            },
            "goals": _goals(figures),
        }  # fmt: skip

    def _warm_up(self) -> None:
        """Sends the first load. Its responses show how many seconds at the start of a load must be left out."""
        run = self._load([self._keys.load("peak", self._parsed.warm_up_rate)], self._parsed.peak_duration / 2)
        self._settle_s = max(SETTLE_S, _stream_s(run))

    def _round(self, number: int, peak_rate: float) -> Round:
        """Sends the loads of one round: the peak first in even rounds, last in odd rounds."""
        parsed, keys = self._parsed, self._keys
        light = [keys.load(f"light-{i}", parsed.light_share * peak_rate / LIGHT_KEYS) for i in range(LIGHT_KEYS)]
        rate = parsed.factor * peak_rate
        heavy = [keys.load(f"heavy-{name}", rate / len(HEAVY_KEYS)) for name in HEAVY_KEYS]
        seed = LIGHT_SEED + 1000 * number

        def peak() -> FloodRun:
            return self._load([keys.load("peak", peak_rate)], parsed.duration)

        first = peak() if number % 2 == 0 else None
        before = psutil.cpu_times()
        with sampled(MEMORY_INTERVAL_S, children_mib) as memory:
            overload = self._load([*light, *heavy], parsed.duration, seed)
        stolen = _stolen_share(before, psutil.cpu_times())
        alone = self._load(light, parsed.duration, seed)
        found = Round(first or peak(), overload, alone, memory, stolen)
        _progress(
            f"round {number + 1}: goodput {self._goodput(found.peak):.2f}/s at {peak_rate:.1f} requests/s, "
            f"{self._goodput(overload):.2f}/s at {rate:.0f} requests/s"
        )
        return found

    def _load(self, loads: Sequence[KeyLoad], duration_s: float, seed: int | None = None) -> FloodRun:
        """Runs one load. Without ``seed``, each load has different requests. The key at index i uses the seed plus i.
        """
        self._num_loads += 1
        seed = self._parsed.seed + (1000 * self._num_loads if seed is None else seed)
        return run_flood(self._endpoint, self._model, loads, self._lengths, duration_s, seed)

    def _peak_rows(self) -> list[dict[str, Any]]:
        """Measures the goodput at the rates of ``--rates``, or at rates around the peak. Returns a row for each rate.
        """
        parsed = self._parsed
        if parsed.rates is not None:
            return [self._peak_row(rate, parsed.peak_duration) for rate in parsed.rates]
        rate, shortest = parsed.warm_up_rate, SETTLES_PER_LOAD * self._settle_s
        while True:
            goodput = self._peak_row(rate, max(parsed.peak_duration / 2, shortest))["goodput_per_s"]
            if goodput < KEPT_SHARE * rate:
                break
            rate *= 2
        duration_s = max(parsed.peak_duration, shortest)
        rows = [self._peak_row(step * goodput, duration_s) for step in PEAK_STEPS]
        for _ in range(MAX_FURTHER_STEPS):
            if rows[-1]["goodput_per_s"] < max(row["goodput_per_s"] for row in rows):
                break
            rows.append(self._peak_row(rows[-1]["rate"] * PEAK_STEPS[2], duration_s))
        return rows

    def _peak_row(self, rate: float, duration_s: float) -> dict[str, Any]:
        run = self._load([self._keys.load("peak", rate)], duration_s)
        row = {"rate": rate, "goodput_per_s": self._goodput(run), **_counts(run.results)}
        _progress(f"{rate:.1f} requests/s: goodput {row['goodput_per_s']:.2f}/s, {row['refused']} refused")
        return row

    def _goodput(self, run: FloodRun) -> float:
        settle_s = min(self._settle_s, run.duration_s / SETTLES_PER_LOAD)
        return run.goodput(self._parsed.slo_ttft_ms, self._parsed.slo_tpot_ms, settle_s)

    def _limit_heavy_keys(self, peak: float) -> None:
        """Gives the heavy keys their quotas, and waits until the server has read the key file again."""
        parsed = self._parsed
        largest = parsed.prompt_len[1] + parsed.output_len[1]
        mean = (sum(parsed.prompt_len) + sum(parsed.output_len)) / 2
        per_minute = 60 * QUOTA_SHARE * peak
        rights = {
            "heavy-requests": f"requests_per_minute={max(1, round(per_minute))}",
            "heavy-tokens": f"tokens_per_minute={max(largest, round(mean * per_minute))}",
            "heavy-in-flight": f"requests_in_flight={QUOTA_IN_FLIGHT}",
            READER: "models=none",  # /v1/models shows when the server has read the new file
        }
        self._keys.write(rights)
        headers = {"Authorization": f"Bearer {self._keys.secrets[READER]}"}
        until = time.monotonic() + KEY_FILE_TIMEOUT_S
        while b'"id"' in self._endpoint.get("/v1/models", 10.0, headers)[2]:
            if time.monotonic() > until:
                raise LoadTestError("the server did not read the changed key file")
            time.sleep(0.1)

    def _figures(self, rounds: Sequence[Round]) -> dict[str, Any]:
        pairs = [(self._goodput(each.peak), self._goodput(each.overload)) for each in rounds]
        shares = [overload / peak if peak else 0.0 for peak, overload in pairs]
        results = [one for each in rounds for one in each.overload.results]
        light = [one for one in results if one.key.startswith("light")]
        ttft_alone = _percentiles(_ttfts([one for each in rounds for one in each.alone.results]))
        ttft = _percentiles(_ttfts(light))
        refusals = {
            code: _percentiles(sorted(one.response_ms or 0.0 for one in results if one.code == code))
            for code in sorted({one.code for one in results if one.status == 429})
        }
        every = sorted(one.response_ms or 0.0 for one in results if one.status == 429)
        return {
            "rounds": [
                {"peak_goodput_per_s": peak, "overload_goodput_per_s": overload, "share": share}
                for (peak, overload), share in zip(pairs, shares, strict=True)
            ],
            "peak_goodput_per_s": statistics.median(peak for peak, _ in pairs),
            "overload_goodput_per_s": statistics.median(overload for _, overload in pairs),
            "goodput_share_of_peak": statistics.median(shares),
            "refusal_ms": _percentiles(every),
            "refusal_ms_by_code": refusals,
            "light_requests": len(light),
            "light_refused": sum(one.status == 429 for one in light),
            "light_ttft_ms": ttft,
            "light_ttft_ms_alone": ttft_alone,
            "light_ttft_ratio": ttft["p99"] / ttft_alone["p99"] if ttft and ttft_alone else None,
            "by_key": {
                key: _counts([one for one in results if one.key == key])
                for key in sorted({one.key for one in results})
            },
        }


def _goals(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    share, refusal, ratio = figures["goodput_share_of_peak"], figures["refusal_ms"], figures["light_ttft_ratio"]
    refusal_ms = None if refusal is None else refusal["p99"]
    refused = figures["light_refused"]
    rows = {
        "goodput": (share, MIN_GOODPUT_SHARE, share >= MIN_GOODPUT_SHARE),
        "refusals": (refusal_ms, MAX_REFUSAL_MS, refusal_ms is not None and refusal_ms <= MAX_REFUSAL_MS),
        "light_ttft": (ratio, MAX_LIGHT_TTFT_RATIO, ratio is not None and ratio <= MAX_LIGHT_TTFT_RATIO),
        "light_refused": (refused, 0, refused == 0),
    }
    return {name: {"figure": figure, "limit": limit, "pass": passed} for name, (figure, limit, passed) in rows.items()}


def _stream_s(run: FloodRun) -> float:
    """Returns the 90th percentile of the seconds from the first to the last event of a response. 0 without responses.
    """
    times = sorted(one.end - one.first for one in run.results if one.first is not None and one.end is not None)
    return percentile(times, 90) if times else 0.0


def _ttfts(results: Sequence[Result]) -> list[float]:
    return sorted(one.ttft_ms for one in results if one.ttft_ms is not None)


def _percentiles(ordered: Sequence[float]) -> dict[str, float] | None:
    return {name: percentile(ordered, percent) for name, percent in PERCENTS} if ordered else None


def _counts(results: Sequence[Result]) -> dict[str, Any]:
    codes = Counter(one.code for one in results if one.status == 429)
    return {"requests": len(results), "refused": codes.total(), "refused_by_code": dict(codes)}


def _stolen_share(before: Any, after: Any) -> float:
    """Returns the fraction of all cores' time that a hypervisor took between two calls of ``psutil.cpu_times``."""
    spent = [later - earlier for earlier, later in zip(before, after, strict=True)]
    return float(after.steal - before.steal) / sum(spent) if sum(spent) > 0 else 0.0


def _progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr)


def _text(results: dict[str, Any]) -> str:
    rows = [[f"{row['rate']:.1f}", format_number(row["goodput_per_s"]), str(row["requests"]), str(row["refused"])]
            for row in results["rates"]]  # fmt: skip
    rate, seconds = results["overload_rate"], results["overload_duration_s"]
    goodput = format_number(results["overload_goodput_per_s"])
    rows.append([f"{rate:.1f}", goodput, str(results["requests"]), str(results["refused"])])
    shares = [each["share"] for each in results["rounds"]]
    memory = results["memory_mib"]
    late = results["client_lateness_ms"]
    times = [
        [name, *(format_number(values[percent]) for percent, _ in PERCENTS)]
        for name, values in [
            *((f"refusal {code}", each) for code, each in results["refusal_ms_by_code"].items()),
            ("light TTFT", results["light_ttft_ms"]),
            ("light TTFT alone", results["light_ttft_ms_alone"]),
        ]
        if values is not None
    ]
    goals = [
        [name, format_number(goal["figure"]), str(goal["limit"]), "yes" if goal["pass"] else "NO"]
        for name, goal in results["goals"].items()
    ]
    return "\n".join(
        [
            format_table(["requests/s", "goodput/s", "requests", "refused"], rows),
            "",
            f"  {rate:.0f} requests/s, {len(shares)} times for {seconds:g} s: {results['goodput_share_of_peak']:.1%} of"
            f" the peak's goodput (median of {', '.join(f'{share:.1%}' for share in shares)})",
            f"  memory {memory['start']:.0f} MiB at the start, maximum {memory['first_third']:.0f} in the first third"
            f" and {memory['last_third']:.0f} in the last",
            f"  the client took {results['client_cpu_share']:.1%} of a core, and was late by {late['p99']:.1f} (p99) to"
            f" {late['max']:.1f} (max) ms; a hypervisor took {results['stolen_share']:.1%} of the cores' time",
            "",
            format_table(["ms", *(name for name, _ in PERCENTS)], times),
            "",
            format_table(["goal", "figure", "limit", "met"], goals),
        ]
    )


def _rates(text: str) -> tuple[float, ...]:
    return tuple(positive(part) for part in text.split(","))


_OPTIONS: tuple[tuple[str, Callable[[str], Any], Any, str, str], ...] = (
    ("--rates", _rates, None, "R,R", "request rates among which the peak is (default: the program finds them)"),
    ("--peak-duration", positive, 20.0, "S", "seconds at each rate of the search for the peak (default %(default)s)"),
    ("--factor", positive, 10.0, "F", "rate of the heavy keys, as a multiple of the peak's rate (default %(default)s)"),
    ("--rounds", parse_count, 3, "N", "number of rounds of three loads (default %(default)s)"),
    ("--duration", positive, 60.0, "S", "seconds of each load of a round (default %(default)s)"),
    ("--light-share", positive, 0.05, "F", "rate of the light keys, as a fraction of the peak's (default %(default)s)"),
    ("--warm-up-rate", positive, 10.0, "R", "requests/s of the warm-up and of the first search (default %(default)s)"),
    ("--prompt-len", parse_range, (128, 384), "A:B", "tokens of a prompt, from A to B (default 128:384)"),
    ("--output-len", parse_range, (32, 128), "A:B", "tokens of an output, from A to B (default 32:128)"),
    ("--max-waiting", int, 64, "N", "maximum number of requests in the server's queue (default %(default)s)"),
    ("--slo-ttft-ms", positive, 1000.0, "MS", "objective of the time to first token (default %(default)s)"),
    ("--slo-tpot-ms", positive, 100.0, "MS", "objective of the mean time per output token (default %(default)s)"),
    ("--seed", int, 0, "N", "seed of prompts, lengths and arrival times (default %(default)s)"),
)
"""The options of the program: name, type, default, name of the value in the help, and help text."""


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__, "smollm2_135m_cpu.yaml", starts_servers=True)
    for name, kind, default, metavar, text in _OPTIONS:
        parser.add_argument(name, type=kind, default=default, metavar=metavar, help=text)
    return parser
