"""The study of batching modes: one engine, one load, each mode of batching in turn.

    none         one request at a time
    static       what waits when the device becomes free runs as one batch, to the end of its longest request
    dynamic      a batch leaves when it is full or late, the next one waits until it has ended
    continuous   requests join and leave at any step; each reserves contiguous room for its longest answer
    paged        the same, with blocks on demand (paged attention)

Clients in a closed loop send prompts of 64 to 256 random tokens (160 in the mean, as the conversations of ShareGPT have
161: Kwon et al. 2023) that want 64, 128 or 256 tokens (end tokens are ignored); both are drawn by seed and the same in
every mode. So are the answers, which is checked.

How far behind static and dynamic batching are depends on ``--batch-size``: a larger batch serves more clients at a
time, and each waits for the longest of more. docs/scheduling.md has several.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from performance.load.batching import (
    BATCH_SIZE,
    BATCH_WAIT_S,
    MODES,
    OUTPUTS,
    PROMPT_LEN,
    VOCAB,
    Measured,
    format_results,
    measure_mode,
    mode_settings,
    results_json,
)
from performance.load.options import LoadOptions
from performance.load.server_process import START_SERVER
from performance.load.workload import LoadRequest, study_workload
from performance.program import UsageError, exits_with_errors, positive, write_json
from performance.simulation.presets import PRESETS
from performance.simulation.recording import fit_recording
from performance.simulation.runs import NOWHERE, simulate
from performance.simulation.setup import make_setup, simulated_config
from performance.simulation.workload import ClosedLoop, SimulatedRequest

DEFAULT_MODES = ("static", "dynamic", "continuous", "paged")


@exits_with_errors
def main(arguments: Sequence[str] | None = None, program: Path = START_SERVER) -> int:
    """0; 1 when requests failed or answers differ between modes, 2 when a server did not start."""
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
    """The load of the study under one mode. Raises ConfigError, or UsageError about the recording."""
    settings = [*mode_settings(mode, parsed.batch_size, parsed.batch_wait), *parsed.settings]
    fit = None
    if parsed.recording is not None:
        fit = fit_recording(parsed.recording, simulated_config(parsed.config, parsed.settings, parsed.simulate))
    setup = make_setup(parsed.config, settings, parsed.simulate, fit)
    asked = [SimulatedRequest(each.token_ids or (), each.max_tokens) for each in requests]
    options = LoadOptions(NOWHERE, seed=parsed.seed)
    run = simulate(mode, setup, ClosedLoop(asked, parsed.clients), options)
    return Measured(mode, run.figures, run.outcome.kv_waste)


def _check(parsed: argparse.Namespace) -> None:
    for name in ("clients", "requests", "batch_size"):
        if getattr(parsed, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(parsed, name)}: the least is 1")


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(text.split(","))
    for mode in modes:
        if mode not in MODES:
            raise argparse.ArgumentTypeError(f"{mode!r}: there are {', '.join(MODES)}")
    return modes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama_160m_cpu.yaml", help="default %(default)s")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="for all modes"
    )
    parser.add_argument("--clients", type=int, default=50, help="in a closed loop (default %(default)s)")
    parser.add_argument("--requests", type=int, default=1000, help="in all (default %(default)s)")
    parser.add_argument(
        "--modes", type=_modes, default=DEFAULT_MODES, metavar="M,M", help=f"default {','.join(DEFAULT_MODES)}"
    )
    parser.add_argument(
        "--batch-size", type=int, default=BATCH_SIZE, help="of static and dynamic batching (default %(default)s)"
    )
    parser.add_argument(
        "--batch-wait",
        type=positive,
        default=BATCH_WAIT_S,
        metavar="S",
        help="seconds a dynamic batch that is not full waits (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and lengths (default %(default)s)")
    parser.add_argument("--simulate", choices=sorted(PRESETS), metavar="DEVICE", help="in the simulator: %(choices)s")
    parser.add_argument("--recording", type=Path, metavar="F", help="with --simulate cpu: fit the device from this")
    parser.add_argument("--timeout", type=positive, default=3600.0, help="seconds for one request")
    parser.add_argument("--start-timeout", type=positive, default=600.0, help="seconds for a server to be ready")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    return parser
