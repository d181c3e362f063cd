"""Fits the simulator to this machine and holds it against real runs that the fit has not seen.

Servers of the configuration are started one after the other: one that is calibrated, one that is validated, and so on,
a calibration last. The calibrations go through the sizes of steps (few and many rows, short and long prompts, a burst);
their flight recordings together make the fit. Each validation is an open-loop load; the simulator then gets the same
requests at the same moments.

Chance moves figures, too, the tails most: which prompts meet, and so how long a pause is, depends on a millisecond. So
the simulated figures are means over some runs whose steps are spread differently, with the deviation of a single run
beside them, and a load is as long as it takes for that to be small in most.

A machine's speed drifts, and one server is faster than the next: by more than the simulator may be off. So a short
probe, the same each time, runs on the validated server right before its load and right after. How much longer the
probes' steps took than the fit says, in the mean of the two, is how much longer everything takes in the simulation of
that load, of which itself nothing is looked at.

Rates suit a model of some hundred million parameters on two cores; --scale makes all of them smaller or larger.
--keep keeps what was recorded, by the servers and by their clients, and --kept compares with that again, without a
server: what another model of the same runs is worth can be seen in seconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from performance.load.client import LoadRun, run_load
from performance.load.errors import UsageError
from performance.load.exit_codes import told_errors
from performance.load.options import LoadOptions, positive
from performance.load.report import report_json, write_json
from performance.load.server_process import START_SERVER, configured_server
from performance.load.statistics import measure
from performance.simulation.fit import StepFit
from performance.simulation.kept_runs import read_runs, write_runs
from performance.simulation.requests import of_load_test
from performance.simulation.runs import NOWHERE, simulate
from performance.simulation.setup import make_setup, simulated_config
from performance.simulation.validate import GOAL, Compared, compare, comparison_text, mean_of_runs
from performance.simulation.workload import OpenLoop

__all__ = ["CALIBRATION", "VALIDATION", "Load", "main"]

VOCAB = 1000
WARM_UP = 4


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of random tokens, open loop."""

    name: str
    rate: float
    duration: float
    prompts: tuple[int, int]
    outputs: tuple[int, int]
    seed: int

    def options(self, scale: float) -> LoadOptions:
        """To nowhere yet. Fewer requests a second come for longer: as many in all."""
        return LoadOptions(
            NOWHERE, rate=self.rate * scale, duration=self.duration / scale, seed=self.seed, token_ids=True,
            vocab_size=VOCAB, prompt_len=self.prompts, output_len=self.outputs, ignore_eos=True, return_token_ids=True,
            warmup=WARM_UP, timeout_s=3600.0,
        )  # fmt: skip


CALIBRATION = (
    Load("alone", 1, 5, (16, 64), (16, 64), 11),
    Load("few", 4, 8, (16, 300), (16, 128), 12),
    Load("many", 9, 8, (32, 64), (64, 192), 13),
    Load("burst", 64, 1, (16, 512), (32, 96), 14),
    Load("long prompts", 3, 5, (256, 1500), (16, 64), 15),
    Load("single prompts", 4, 5, (16, 256), (4, 8), 16),
    Load("single long prompts", 2, 10, (16, 1100), (4, 8), 17),
)
PROBE = Load("probe", 6, 4, (16, 256), (32, 96), 21)
"""Tells how fast the machine is: some rows that decode, some prompts."""
VALIDATION = (
    Load("moderate", 4, 60, (16, 256), (16, 128), 1),
    Load("many answers", 8, 60, (32, 64), (64, 192), 2),
    Load("long prompts", 2, 90, (128, 1024), (32, 128), 3),
)
SEEDS = 8
"""Simulated runs of a load."""


@told_errors
def main(arguments: Sequence[str] | None = None, program: Path = START_SERVER) -> int:
    """0; 1 when requests failed, 2 when a server did not start."""
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
        measured, calibrated = [], []
        for number, load in enumerate(VALIDATION):
            calibrated += self._serve(f"calibration {number}", CALIBRATION, self._recordings)
            measured.append(self._serve(load.name, [PROBE, load, PROBE], self._recording_of(load)))
        calibrated += self._serve(f"calibration {len(VALIDATION)}", CALIBRATION, self._recordings)
        fit = self._fit(calibrated)
        results = [self._compare(load, runs, fit) for load, runs in zip(VALIDATION, measured, strict=True)]
        rows = [row for _, rows in results for row in rows]
        off = [abs(row.error) for row in rows]
        within = sum(error <= GOAL for error in off)
        print(f"all loads: {within} of {len(off)} figures within {GOAL:.0%}, the worst is off by {max(off):.0%}")
        if parsed.save_fit is not None:
            write_json(parsed.save_fit, fit.as_json())
            print(f"  {parsed.save_fit}")
        if parsed.json is not None:
            write_json(parsed.json, {name: {row.name: row.as_json() for row in rows} for name, rows in results})
        return 1 if self._failed else 0

    def _recording_of(self, load: Load) -> Path:
        return self._folder / f"recording of {load.name}"

    def _serve(self, name: str, loads: Sequence[Load], recording: Path) -> list[LoadRun]:
        """A server for some loads, one after the other, with its flight recording in the folder ``recording``. Of a
        study that was kept: what it was."""
        parsed = self._parsed
        options = [load.options(parsed.scale) for load in loads]
        kept = self._folder / f"clients of {name}.json"
        if parsed.kept is not None:
            return read_runs(kept, options)
        place = self._folder / name.replace(" ", "_")
        settings = [*parsed.settings, f"log_config.flight_recorder={recording}"]
        print(f"{name}: starting the server", file=sys.stderr)
        runs = []
        server = configured_server(name, parsed.config, settings, place, parsed.start_timeout, self._program)
        with server as endpoint:
            for load, asked in zip(loads, options, strict=True):
                run = run_load(replace(asked, endpoint=endpoint))
                if run.interrupted:
                    raise KeyboardInterrupt
                failed = measure(run).failed
                self._failed += failed
                print(f"  {load.name}: {len(run.records)} requests, {failed} failed", file=sys.stderr)
                runs.append(run)
        if parsed.keep is not None:
            write_runs(kept, runs)
        return runs

    def _fit(self, runs: Sequence[LoadRun]) -> StepFit:
        from performance.simulation.recording import fit_recording, with_delivery

        config = simulated_config(self._parsed.config, self._parsed.settings, "cpu")
        fit = fit_recording(self._recordings, config)
        return with_delivery(fit, self._recordings, [record for run in runs for record in run.records])

    def _slowdowns(self, load: Load, probes: Sequence[LoadRun], fit: StepFit) -> list[float]:
        """How many times as long as in the calibrations the probes' steps took."""
        from performance.simulation.recording import slowdown_within

        spans = [(probe.start, probe.start + probe.total_time_s) for probe in probes]
        return [slowdown_within(fit, self._recording_of(load), [span]) for span in spans]

    def _compare(self, load: Load, runs: Sequence[LoadRun], fit: StepFit) -> tuple[str, list[Compared]]:
        before, run, after = runs
        slowdowns = self._slowdowns(load, [before, after], fit)
        fit = fit.slowed(statistics.fmean(slowdowns))
        measured: dict[str, Any] = report_json(run, measure(run))
        setup = make_setup(self._parsed.config, self._parsed.settings, "cpu", fit)
        arrivals = of_load_test(measured, run.options)
        options = run.options
        simulated = [
            simulate(load.name, setup, OpenLoop(arrivals.requests, arrivals.times), replace(options, seed=seed))
            for seed in range(SEEDS)
        ]
        rows = mean_of_runs([compare(measured, one) for one in simulated])
        print(
            f"{load.name}: {options.rate:g} requests/s for {options.duration:g} s, prompts of {load.prompts[0]} to"
            f" {load.prompts[1]} tokens, answers of {load.outputs[0]} to {load.outputs[1]}\n"
            f"  steps took {slowdowns[0]:.3f} times as long as in the calibrations right before it, {slowdowns[1]:.3f}"
            f" right after\n\n{comparison_text(rows)}\n"
        )
        return load.name, rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama_160m_cpu.yaml", help="default %(default)s")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="for all")
    parser.add_argument("--scale", type=positive, default=1.0, help="of all rates (default %(default)s)")
    parser.add_argument("--start-timeout", type=positive, default=600.0, help="seconds for a server to be ready")
    runs = parser.add_mutually_exclusive_group()
    runs.add_argument("--keep", type=Path, metavar="FOLDER", help="keep recordings and what clients saw in this folder")
    runs.add_argument("--kept", type=Path, metavar="FOLDER", help="start no server, compare with what was kept there")
    parser.add_argument("--save-fit", type=Path, metavar="FILE", help="write the fit here, for simulate.py --fit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison here")
    return parser
