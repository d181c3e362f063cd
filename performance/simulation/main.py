"""The simulator's program, from the command line to the exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llm_serving.flight.format import SUFFIX
from performance.load.options import LoadOptions
from performance.program import UsageError, exits_with_errors, write_json
from performance.simulation.fit import StepFit, read_fit
from performance.simulation.options import SimulationOptions, Variant, parse_options
from performance.simulation.rate import find_rate
from performance.simulation.report import comparison_table, result_json, run_text, run_title
from performance.simulation.requests import Arrivals, generated, of_load_test, of_trace
from performance.simulation.runs import SimulatedRun, simulate
from performance.simulation.setup import Setup, make_setup, simulated_config, split_settings
from performance.simulation.validate import compare, comparison_text, read_load_test
from performance.simulation.workload import OpenLoop


@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the simulator. Returns 0 for success, 2 for an error in the options or files, 130 if interrupted."""
    options = parse_options(arguments)
    fit = _fit(options)
    if options.validate is not None:
        return _validate(options, fit)
    return _simulate_all(options, fit)


def _fit(options: SimulationOptions) -> StepFit | None:
    fit = None
    if options.recording is not None:
        from performance.simulation.recording import fit_recording

        theirs, _ = split_settings(options.settings)
        fit = fit_recording(options.recording, simulated_config(options.config, theirs, options.device))
    elif options.fit is not None:
        fit = read_fit(options.fit)
    if options.save_fit is not None:
        if fit is None:
            raise UsageError("--save-fit: there is no fit to save; use --recording")
        write_json(options.save_fit, fit.as_json())
        print(f"  {options.save_fit}", file=sys.stderr)
    return fit


def _simulate_all(options: SimulationOptions, fit: StepFit | None) -> int:
    runs: list[SimulatedRun] = []
    rates: dict[str, Any] = {}
    for variant in options.variants():
        setup = make_setup(options.config, variant.settings, options.device, fit)
        load = options.load if variant.rate is None else replace(options.load, rate=variant.rate)
        if options.find_rate:
            found = find_rate(lambda rate: _run(variant, setup, options, replace(load, rate=rate)), load.rate)  # noqa: B023
            rates[variant.name] = found.as_json()
            runs.append(found.run)
            print(f"{variant.name}: {found.rate:.3g} requests/s meet the objectives, {found.above:.3g} do not")
        else:
            runs.append(_run(variant, setup, options, load))
    print(run_text(runs[0]) if len(runs) == 1 else comparison_table(runs))
    _write(options, runs, rates)
    return 0


def _run(variant: Variant, setup: Setup, options: SimulationOptions, load: LoadOptions) -> SimulatedRun:
    arrivals = _arrivals(options, load, setup)
    return simulate(variant.name, setup, OpenLoop(arrivals.requests, arrivals.times), load, options.cluster)


def _arrivals(options: SimulationOptions, load: LoadOptions, setup: Setup) -> Arrivals:
    if options.trace is not None and (options.trace.is_dir() or options.trace.suffix == SUFFIX):
        from performance.simulation.recording import of_recording

        return of_recording(options.trace, load)
    if options.trace is not None:
        return of_trace(options.trace, load)
    return generated(load, setup.config)


def _write(options: SimulationOptions, runs: Sequence[SimulatedRun], rates: dict[str, Any]) -> None:
    if options.json_path is not None:
        write_json(options.json_path, result_json(options, runs, rates))
        print(f"\n  {options.json_path}")
    if options.plot_dir is None:
        return
    from performance.load.plot import write_plot

    for each in runs:
        name = "".join(letter if letter.isalnum() else "_" for letter in each.name)
        path = options.plot_dir / f"simulated_{each.device}_{name}_seed{options.load.seed}.png"
        write_plot(path, each.run, each.figures, run_title(each))
        print(f"  {path}")


def _validate(options: SimulationOptions, fit: StepFit | None) -> int:
    """Simulates the requests of a load test under each policy, and compares the results with those of the load test."""
    assert options.validate is not None
    measured = read_load_test(options.validate)
    results: dict[str, Any] = {}
    for variant in options.variants():
        setup = make_setup(options.config, variant.settings, options.device, fit)
        arrivals = of_load_test(measured, options.load)
        load = replace(options.load, rate=measured["options"]["rate"], duration=measured["options"]["duration_s"])
        run = simulate(variant.name, setup, OpenLoop(arrivals.requests, arrivals.times), load)
        rows = compare(measured, run.as_json())
        print(f"{run_title(run)}\nagainst {options.validate}\n\n{comparison_text(rows)}")
        results[variant.name] = {row.name: row.as_json() for row in rows}
    write_json(options.json_path, {"validate": str(options.validate), "policies": results})
    return 0
