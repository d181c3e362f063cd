"""Fits the simulator to this machine and compares it with real runs that were not used for the fit.

The program starts servers one after the other. The first servers are for calibration. Each of them runs the same loads,
which cover all step sizes: few and many rows, short and long prompts, and a burst. The simulator is fitted to the
flight recordings of all these servers. Because they ran the same loads, the fit can remove differences of the machine's
speed. Each further server is for validation: it runs an open-loop load, and the simulator runs the same requests at the
same times.

Chance influences the figures, mostly the tail latencies: a millisecond can decide which prompts run together. A
simulated figure is therefore the mean of several simulations with different noise. The report shows it with the
standard deviation of a single simulation. The loads are long enough to make this deviation small for most figures.

The machine's speed changes over time and from server to server, and these changes are larger than the simulator's
errors. Therefore a load is divided into parts of some seconds. A probe, which is a short load that is always the same,
measures the machine's speed before and after each part. The mean slowdown of both probes is applied to the simulation
of the part. Decode steps of few rows, decode steps of many rows and steps with prompts have separate factors, because
memory and arithmetic rarely become slow together. The simulation of a part never uses measured figures of the part.

A part is not compared with its simulation if its two probes differ, or if other processes used the cores. The part is
then repeated, up to --tries times, and the report lists the discarded tries. A part that was never steady is left out.
If this happens to half of a load's parts, the load does not count, and the report names it.

The request rates suit a model of some hundred million parameters on two cores. Use --scale to multiply them. Use --keep
to store the recordings of the servers and the measurements of the clients. Use --kept to compare with the stored data,
without a server. A changed simulator can then be evaluated within seconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from performance.load.client import LoadRun, run_load
from performance.load.endpoint import Endpoint
from performance.load.options import LoadOptions
from performance.load.report import report_json
from performance.load.server_process import START_SERVER, configured_server
from performance.load.statistics import measure
from performance.load.watches import fraction_of_others, processor_seconds
from performance.program import (
    EXIT_FAILURES,
    EXIT_UNSTEADY,
    UsageError,
    exits_with_errors,
    new_parser,
    positive,
    write_json,
)
from performance.simulation.fit import StepFit
from performance.simulation.kept_runs import read_others, read_runs, write_runs
from performance.simulation.reality_loads import CALIBRATION, PROBE, VALIDATION, Load
from performance.simulation.reality_report import ComparedLoad, closing_text, comparison_json, result_text
from performance.simulation.requests import of_load_test
from performance.simulation.runs import simulate
from performance.simulation.setup import Setup, make_setup, simulated_config
from performance.simulation.steadiness import Probe, Try, comparable, joined, run_until_steady
from performance.simulation.validate import compare, mean_of_runs
from performance.simulation.workload import OpenLoop

__all__ = ["main"]

CALIBRATIONS = 4
"""Number of real servers whose measured steps calibrate the simulation."""
SEEDS = 8
"""Number of simulated runs per load."""


@exits_with_errors
def main(arguments: Sequence[str] | None = None, program: Path = START_SERVER) -> int:
    """Runs the comparison and returns the exit code.

    0: success. 1: requests failed. 2: a server did not start. 3: the machine's speed changed too much during a load.
    """
    parsed = _parser().parse_args(arguments)
    kept: Path | None = parsed.kept or parsed.keep
    if kept is not None:
        if parsed.keep is not None and kept.is_dir() and any(kept.iterdir()):
            raise UsageError(f"--keep {kept}: the folder is not empty")
        return _Study(parsed, program, kept).run()
    with tempfile.TemporaryDirectory(prefix="validate_simulator_") as folder:
        return _Study(parsed, program, Path(folder)).run()


class _Study:
    """One execution of the program: calibration, validation loads, and their comparison with simulations."""

    def __init__(self, parsed: argparse.Namespace, program: Path, folder: Path) -> None:
        self._parsed = parsed
        self._program = program
        self._folder = folder
        self._recordings = folder / "recordings"
        self._failed = 0

    def run(self) -> int:
        parsed = self._parsed
        fit = self._fit([self._calibrate(number) for number in range(CALIBRATIONS)])
        tries = self._read_tries if parsed.kept is not None else self._run_tries
        parts = [tries(load, fit) for load in VALIDATION]
        results = [self._compare(load, of_load, fit) for load, of_load in zip(VALIDATION, parts, strict=True)]
        for one in results:
            print(result_text(one, parsed.scale))
        print(closing_text(results))
        if parsed.save_fit is not None:
            write_json(parsed.save_fit, fit.as_json())
            print(f"  {parsed.save_fit}")
        write_json(parsed.json, comparison_json(results))
        if self._failed:
            return EXIT_FAILURES
        return 0 if all(one.is_steady for one in results) else EXIT_UNSTEADY

    def _calibrate(self, number: int) -> list[LoadRun]:
        """Runs all calibration loads on a server, or reads the stored runs."""
        loads = (*CALIBRATION, *PROBE)
        options = [load.options(self._parsed.scale) for load in loads]
        name = f"calibration {number}"
        if self._parsed.kept is not None:
            return read_runs(self._clients_of(name), options)
        with self._server(name, self._recordings) as endpoint:
            runs = [self._run(load.name, asked, endpoint) for load, asked in zip(loads, options, strict=True)]
        self._keep(name, runs)
        return runs

    def _run_tries(self, load: Load, fit: StepFit) -> list[list[Try]]:
        """Runs every part of a load on one server. Repeats a part until the machine's speed was steady.

        Returns all tries of each part.
        """
        scale, parts = self._parsed.scale, []
        with self._server(load.name, self._recording_of(load)) as endpoint:

            def probe() -> Probe:
                return self._probed(load, [self._run(one.name, one.options(scale), endpoint) for one in PROBE], fit)

            before = probe()
            for part in range(load.parts):
                name, asked = f"{load.name}, part {part}", load.options(scale, part)
                run = partial(self._run_watched, name, asked, endpoint)
                tries = run_until_steady(run, probe, before, self._parsed.tries)
                before = tries[-1].after
                for number, one in enumerate(tries):
                    self._keep(f"{name}, try {number}", [*one.before.runs, one.run, *one.after.runs], one.others)
                parts.append(tries)
        return parts

    def _read_tries(self, load: Load, fit: StepFit) -> list[list[Try]]:
        """Reads the stored tries of a load, and evaluates their probes with ``fit``."""
        scale, probe = self._parsed.scale, [one.options(self._parsed.scale) for one in PROBE]
        parts = []
        for part in range(load.parts):
            tries: list[Try] = []
            while not tries or self._clients_of(f"{load.name}, part {part}, try {len(tries)}").exists():
                path = self._clients_of(f"{load.name}, part {part}, try {len(tries)}")
                runs = read_runs(path, [*probe, load.options(scale, part), *probe])
                before, run, after = runs[: len(probe)], runs[len(probe)], runs[len(probe) + 1 :]
                others = read_others(path)
                tries.append(Try(self._probed(load, before, fit), run, self._probed(load, after, fit), others))
            parts.append(tries)
        return parts

    def _recording_of(self, load: Load) -> Path:
        return self._folder / f"recording of {load.name}"

    def _clients_of(self, name: str) -> Path:
        return self._folder / f"clients of {name}.json"

    def _keep(self, name: str, runs: Sequence[LoadRun], others: float = 0.0) -> None:
        if self._parsed.keep is not None:
            write_runs(self._clients_of(name), runs, others)

    @contextmanager
    def _server(self, name: str, recording: Path) -> Iterator[Endpoint]:
        """Starts a server that writes its flight recording to the folder ``recording``."""
        parsed = self._parsed
        settings = [*parsed.settings, f"log_config.flight_recorder={recording}"]
        place = self._folder / name.replace(" ", "_")
        print(f"{name}: starting the server", file=sys.stderr)
        with configured_server(name, parsed.config, settings, place, parsed.start_timeout, self._program) as endpoint:
            yield endpoint

    def _run(self, name: str, options: LoadOptions, endpoint: Endpoint) -> LoadRun:
        run = run_load(replace(options, endpoint=endpoint))
        if run.interrupted:
            raise KeyboardInterrupt
        failed = measure(run).failed
        self._failed += failed
        print(f"  {name}: {len(run.records)} requests, {failed} failed", file=sys.stderr)
        return run

    def _run_watched(self, name: str, options: LoadOptions, endpoint: Endpoint) -> tuple[LoadRun, float]:
        before = processor_seconds()
        run = self._run(name, options, endpoint)
        return run, fraction_of_others(before, processor_seconds())

    def _fit(self, calibrations: Sequence[Sequence[LoadRun]]) -> StepFit:
        """Fits the simulator to the steps of all calibration servers.

        All calibration servers ran the same loads, so differences between the servers show changes of the machine's
        speed.
        """
        from performance.simulation.recording import fit_recording, with_delivery

        config = simulated_config(self._parsed.config, self._parsed.settings, "cpu")
        repeated = [[_span(run) for run in runs] for runs in zip(*calibrations, strict=True)]
        fit = fit_recording(self._recordings, config, repeated)
        records = [record for runs in calibrations for run in runs for record in run.records]
        return with_delivery(fit, self._recordings, records)

    def _probed(self, load: Load, runs: list[LoadRun], fit: StepFit) -> Probe:
        """Returns the probe that consists of ``runs``. The machine's speed comes from the steps in the server's flight
        recording.
        """
        from performance.simulation.recording import slowdown_within

        return Probe(runs, slowdown_within(fit, self._recording_of(load), [_span(run) for run in runs]))

    def _compare(self, load: Load, parts: list[list[Try]], fit: StepFit) -> ComparedLoad:
        measured, simulated = [], []
        for one in comparable(parts):
            setup = make_setup(self._parsed.config, self._parsed.settings, "cpu", fit.slowed(one.slowdown))
            measured.append(one.run)
            simulated.append([_simulated(one.run, setup, seed) for seed in range(SEEDS)])
        real = _report(measured)
        rows = mean_of_runs([compare(real, _report(runs)) for runs in zip(*simulated, strict=True)])
        return ComparedLoad(load, parts, rows)


def _span(run: LoadRun) -> tuple[float, float]:
    """Returns start and end of a run on the engine's clock, which the client also uses."""
    return run.start, run.start + run.total_time_s


def _simulated(run: LoadRun, setup: Setup, seed: int) -> LoadRun:
    """Simulates the requests of a real run. Each simulated request is sent at the time at which the real one was
    sent.
    """
    arrivals = of_load_test(_report([run]), run.options)
    options = replace(run.options, seed=seed)
    return simulate("", setup, OpenLoop(arrivals.requests, arrivals.times), options).run


def _report(parts: Sequence[LoadRun]) -> dict[str, Any]:
    whole = joined(parts)
    return report_json(whole, measure(whole))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__, "llama_160m_cpu.yaml", starts_servers=True)
    parser.add_argument("--scale", type=positive, default=1.0, help="factor of all rates (default %(default)s)")
    parser.add_argument("--tries", type=_count, default=4, help="maximum tries of a part (default %(default)s)")
    runs = parser.add_mutually_exclusive_group()
    runs.add_argument("--keep", type=Path, metavar="FOLDER", help="store recordings and client measurements here")
    runs.add_argument("--kept", type=Path, metavar="FOLDER", help="start no server; use the data stored by --keep")
    parser.add_argument("--save-fit", type=Path, metavar="FILE", help="write the fit to this file (for simulate.py)")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)
