"""Fits the simulator to this machine and holds it against real runs that the fit has not seen.

Servers of the configuration are started one after the other. The first are calibrated: they go through the sizes of
steps (few and many rows, short and long prompts, a burst, the probe of below), and their flight recordings together
make the fit. Each of these loads runs once on each server, which tells how fast the machine was; that is divided out.
Each further server is validated by an open-loop load; the simulator then gets the same requests at the same moments.

Chance moves figures, too, the tails most: which prompts meet, and so how long a pause is, depends on a millisecond. So
the simulated figures are means over some runs whose steps are spread differently, with the deviation of a single run
beside them, and a load is as long as it takes for that to be small in most.

A machine's speed drifts, and one server is faster than the next: by more than the simulator may be off. So a load is
cut into parts of some seconds, with a short probe, the same each time, before, between and after them. How much longer
the steps of the two probes around a part took than the fit says, in their mean, is how much longer such steps take in
the simulation of that part, of which itself nothing is looked at: steps that decode few rows, steps that decode many
and steps with prompt tokens by factors of their own, as memory and arithmetic are seldom slow together. A part whose
probes do not agree, or during which others took time of the cores, is no evidence: it is run again, up to --tries
times, and what is thrown away is told. A part that was never steady is left out; a load of which half was never steady
is told, and not counted.

Rates suit a model of some hundred million parameters on two cores; --scale makes all of them smaller or larger.
--keep keeps what was recorded, by the servers and by their clients, and --kept compares with that again, without a
server: what another model of the same runs is worth can be seen in seconds.
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
from performance.load.others import OthersWatch
from performance.load.report import report_json
from performance.load.server_process import START_SERVER, configured_server
from performance.load.statistics import measure
from performance.program import EXIT_FAILURES, EXIT_UNSTEADY, UsageError, exits_with_errors, positive, write_json
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
"""Calibrated servers."""
SEEDS = 8
"""Simulated runs of a load."""


@exits_with_errors
def main(arguments: Sequence[str] | None = None, program: Path = START_SERVER) -> int:
    """0; 1 when requests failed, 2 when a server did not start, 3 when the machine was not steady for a load."""
    parsed = _parser().parse_args(arguments)
    kept: Path | None = parsed.kept or parsed.keep
    if kept is not None:
        if parsed.keep is not None and kept.is_dir() and any(kept.iterdir()):
            raise UsageError(f"--keep {kept}: there is something in it already")
        return _Study(parsed, program, kept).run()
    with tempfile.TemporaryDirectory(prefix="validate_simulator_") as folder:
        return _Study(parsed, program, Path(folder)).run()


class _Study:
    """One run of the program."""

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
        """A server that goes through all sizes of steps. Of a study that was kept: what it was."""
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
        """Every try of every part, on one server."""
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
        """What ``_run_tries`` kept, judged by this fit."""
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
        """With its flight recording in the folder ``recording``."""
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
        with OthersWatch() as others:
            run = self._run(name, options, endpoint)
        return run, others.share

    def _fit(self, calibrations: Sequence[Sequence[LoadRun]]) -> StepFit:
        """Of all calibrations, each of the same loads: how fast the machine was at each is told by the others."""
        from performance.simulation.recording import fit_recording, with_delivery

        config = simulated_config(self._parsed.config, self._parsed.settings, "cpu")
        repeated = [[_span(run) for run in runs] for runs in zip(*calibrations, strict=True)]
        fit = fit_recording(self._recordings, config, repeated)
        records = [record for runs in calibrations for run in runs for record in run.records]
        return with_delivery(fit, self._recordings, records)

    def _probed(self, load: Load, runs: list[LoadRun], fit: StepFit) -> Probe:
        """A probe that has ended: its steps are in the recording, and the server is idle."""
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
    """On the engine's clock, which is the client's."""
    return run.start, run.start + run.total_time_s


def _simulated(run: LoadRun, setup: Setup, seed: int) -> LoadRun:
    """The same requests at the same moments."""
    arrivals = of_load_test(_report([run]), run.options)
    options = replace(run.options, seed=seed)
    return simulate("", setup, OpenLoop(arrivals.requests, arrivals.times), options).run


def _report(parts: Sequence[LoadRun]) -> dict[str, Any]:
    whole = joined(parts)
    return report_json(whole, measure(whole))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama_160m_cpu.yaml", help="default %(default)s")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="for all")
    parser.add_argument("--scale", type=positive, default=1.0, help="of all rates (default %(default)s)")
    parser.add_argument("--tries", type=_count, default=4, help="of a part that is not steady (default %(default)s)")
    parser.add_argument("--start-timeout", type=positive, default=600.0, help="seconds for a server to be ready")
    runs = parser.add_mutually_exclusive_group()
    runs.add_argument("--keep", type=Path, metavar="FOLDER", help="keep recordings and what clients saw in this folder")
    runs.add_argument("--kept", type=Path, metavar="FOLDER", help="start no server, compare with what was kept there")
    parser.add_argument("--save-fit", type=Path, metavar="FILE", help="write the fit here, for simulate.py --fit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison here")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 1 on")
    return int(text)
