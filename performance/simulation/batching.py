"""Compares batching modes under the same load, on real servers or in the simulator.

    none         one request at a time
    static       when the device is free, the waiting requests form a batch, which runs until its last request ends
    dynamic      a batch starts when it is full or has waited long enough; the next one waits until it has ended
    continuous   requests join and leave the batch at any step; each reserves memory for its maximum length
    paged        like continuous, but blocks are allocated on demand (paged attention)

Clients in a closed loop send prompts of 64 to 256 random tokens and ask for 64, 128 or 256 tokens; end tokens are
ignored. The mean prompt has 160 tokens; in the ShareGPT conversations it has 161 (Kwon et al. 2023). Prompts and
lengths depend only on the seed, so every mode gets the same requests. The program checks that all modes return the same
text.

The results of static and dynamic batching depend on ``--batch-size``. A larger batch serves more clients at a time, but
each of them waits for the longest request of the batch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from performance.load.closed_loop import run_closed_loop
from performance.load.options import LoadOptions
from performance.load.progress import progress_display
from performance.load.report import COLUMNS, figures_json
from performance.load.server_process import START_SERVER, configured_server
from performance.load.statistics import LoadFigures, measure
from performance.load.watches import fetch_metrics, sampled
from performance.load.workload import LoadRequest, study_workload
from performance.program import UsageError, exits_with_errors, new_parser, positive, write_json
from performance.simulation.presets import PRESETS
from performance.simulation.recording import fit_recording
from performance.simulation.runs import NOWHERE, simulate
from performance.simulation.setup import make_setup, simulated_config
from performance.simulation.workload import ClosedLoop, SimulatedRequest
from performance.terminal import format_number, format_table

MODES: dict[str, tuple[str, bool]] = {
    "none": ("none", True),
    "static": ("static", False),
    "dynamic": ("dynamic", False),
    "continuous": ("continuous", False),
    "paged": ("continuous", True),
}
"""The settings ``batching_strategy`` and ``page_attention`` of each compared mode.

Real servers with static or dynamic batches date from before paged attention. Therefore these modes run without it. In
mode ``none``, a single request has the whole cache, and paged attention makes no difference.
"""
PROMPT_LEN = (64, 256)
OUTPUTS = (64, 128, 256)
VOCAB = 1000
"""Number of different tokens in prompts."""
BATCH_SIZE = 16
"""Batch size of static and dynamic batching."""
BATCH_WAIT_S = 0.05
"""Default of the seconds for which ``dynamic`` batching collects requests."""
WARM_UP = 4
"""Number of first requests that are not measured."""
WASTE_INTERVAL_S = 0.5
"""Seconds between two readings of the metric ``KV_WASTE``."""
KV_WASTE, RUNNING = "llm_serving_kv_waste_ratio", "llm_serving_requests_running"
SHOWN = ("requests/s", "tokens/s", "TTFT p50 ms", "TTFT p99 ms", "TBT p50 ms", "TBT p99 ms")
RATIOS = (("continuous", "dynamic"), ("paged", "continuous"), ("paged", "dynamic"), ("paged", "none"))
DEFAULT_MODES = ("static", "dynamic", "continuous", "paged")


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one batching mode."""

    mode: str
    figures: LoadFigures
    kv_waste: float | None
    texts: tuple[str | None, ...] = ()
    """The generated texts in the order of the requests. None for a failed request. Empty for a simulation."""

    def as_json(self) -> dict[str, Any]:
        return {"requests_per_s": self.figures.qps, "kv_waste": self.kv_waste, **figures_json(self.figures)}


@exits_with_errors
def main(arguments: Sequence[str] | None = None, program: Path = START_SERVER) -> int:
    """Runs the comparison and returns the exit code.

    0: success. 1: requests failed, or texts differ between modes. 2: a server did not start.
    """
    parsed = _parser().parse_args(arguments)
    _check(parsed)
    requests = study_workload(parsed.requests, parsed.seed, PROMPT_LEN, OUTPUTS, VOCAB)
    if parsed.simulate is not None:
        measured = [_simulate(mode, requests, parsed) for mode in parsed.modes]
    else:
        measured = [measure_mode(mode, requests, parsed, program) for mode in parsed.modes]
    results = results_json(measured, parsed)
    print(format_results(measured, results))
    write_json(parsed.json, results)
    return 1 if results["texts_identical"] is False or any(one.figures.failed for one in measured) else 0


def _simulate(mode: str, requests: Sequence[LoadRequest], parsed: argparse.Namespace) -> Measured:
    """Simulates the load in one mode. Raises ConfigError, or UsageError if the recording is not of this model."""
    settings = [*mode_settings(mode, parsed.batch_size, parsed.batch_wait), *parsed.settings]
    fit = None
    if parsed.recording is not None:
        fit = fit_recording(parsed.recording, simulated_config(parsed.config, parsed.settings, parsed.simulate))
    setup = make_setup(parsed.config, settings, parsed.simulate, fit)
    asked = [SimulatedRequest(each.token_ids or (), each.max_tokens) for each in requests]
    options = LoadOptions(NOWHERE, seed=parsed.seed)
    run = simulate(mode, setup, ClosedLoop(asked, parsed.clients), options)
    return Measured(mode, run.figures, run.outcome.kv_waste)


def mode_settings(mode: str, batch_size: int, batch_wait_s: float) -> list[str]:
    """Returns the config settings of a batching mode, each as text ``section.key=value``."""
    strategy, paged = MODES[mode]
    settings = [f"model_config.batching_strategy={strategy}", f"model_config.page_attention={str(paged).lower()}"]
    if strategy in ("static", "dynamic"):
        settings.append(f"model_config.batch_size={batch_size}")
    if strategy == "dynamic":
        settings.append(f"model_config.batch_waiting_time={batch_wait_s}")
    return settings


def measure_mode(mode: str, requests: Sequence[LoadRequest], parsed: argparse.Namespace, program: Path) -> Measured:
    with tempfile.TemporaryDirectory(prefix="compare_batching_") as folder:
        print(f"starting the server for {mode}", file=sys.stderr)
        settings = [*mode_settings(mode, parsed.batch_size, parsed.batch_wait), *parsed.settings]
        server = configured_server(mode, parsed.config, settings, Path(folder), parsed.start_timeout, program)
        with server as endpoint:
            options = LoadOptions(
                endpoint,
                seed=parsed.seed,
                token_ids=True,
                ignore_eos=True,
                keep_text=True,
                warmup=WARM_UP,
                timeout_s=parsed.timeout,
            )

            def waste() -> float | None:
                metrics = fetch_metrics(endpoint)
                return metrics.get(KV_WASTE) if metrics.get(RUNNING, 0.0) > 0 else None

            with progress_display() as display, sampled(WASTE_INTERVAL_S, waste) as wastes:
                run = run_closed_loop(options, requests, parsed.clients, display)
    if run.interrupted:
        raise KeyboardInterrupt
    measured = Measured(
        mode, measure(run), statistics.fmean(wastes) if wastes else None, tuple(record.text for record in run.records)
    )
    print(f"{mode}: {format_number(measured.figures.qps)} requests/s", file=sys.stderr)
    return measured


def results_json(measured: Sequence[Measured], parsed: argparse.Namespace) -> dict[str, Any]:
    """Returns the comparison as JSON. ``texts_identical`` is None for a simulation, which generates no texts."""
    by_mode = {one.mode: one for one in measured}
    texts = [one.texts for one in measured if one.texts]
    return {
        "config": parsed.config,
        "settings": parsed.settings,
        "device": "real" if parsed.simulate is None else parsed.simulate,
        "clients": parsed.clients,
        "requests": parsed.requests,
        "seed": parsed.seed,
        "batch_size": parsed.batch_size,
        "modes": {one.mode: one.as_json() for one in measured},
        "ratios": {
            f"{better}/{worse}": by_mode[better].figures.qps / by_mode[worse].figures.qps
            for better, worse in RATIOS
            if better in by_mode and worse in by_mode and by_mode[worse].figures.qps > 0
        },
        "texts_identical": all(each == texts[0] for each in texts) if texts else None,
    }


def format_results(measured: Sequence[Measured], results: dict[str, Any]) -> str:
    rows = []
    for one in measured:
        waste = None if one.kv_waste is None else 100 * one.kv_waste
        numbers = [*(COLUMNS[name](one.figures) for name in SHOWN), waste]
        rows.append([one.mode, *(format_number(number) for number in numbers), str(one.figures.failed)])
    lines = [format_table(["", *SHOWN, "KV waste %", "failed"], rows), ""]
    lines += [f"  {name}: {ratio:.2f}" for name, ratio in results["ratios"].items()]
    if results["texts_identical"] is not None:
        same = "the same in every mode" if results["texts_identical"] else "NOT the same in every mode"
        lines.append(f"  texts: {same}")
    return "\n".join(lines)


def _check(parsed: argparse.Namespace) -> None:
    for name in ("clients", "requests", "batch_size"):
        if getattr(parsed, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(parsed, name)}: the minimum is 1")


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(text.split(","))
    for mode in modes:
        if mode not in MODES:
            raise argparse.ArgumentTypeError(f"{mode!r}: the modes are {', '.join(MODES)}")
    return modes


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__, "llama_160m_cpu.yaml", starts_servers=True)
    parser.add_argument("--clients", type=int, default=50, help="number of clients (default %(default)s)")
    parser.add_argument("--requests", type=int, default=1000, help="number of requests (default %(default)s)")
    parser.add_argument(
        "--modes", type=_modes, default=DEFAULT_MODES, metavar="M,M", help=f"default {','.join(DEFAULT_MODES)}"
    )
    parser.add_argument(
        "--batch-size", type=int, default=BATCH_SIZE, help="for static and dynamic batching (default %(default)s)"
    )
    parser.add_argument(
        "--batch-wait",
        type=positive,
        default=BATCH_WAIT_S,
        metavar="S",
        help="maximum seconds that a dynamic batch waits to become full (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and lengths (default %(default)s)")
    parser.add_argument("--simulate", choices=sorted(PRESETS), metavar="DEVICE", help="simulate; device: %(choices)s")
    parser.add_argument(
        "--recording", type=Path, metavar="F", help="with --simulate cpu: fit the device to this recording"
    )
    parser.add_argument("--timeout", type=positive, default=3600.0, help="maximum seconds for one request")
    return parser
