"""Compares batching modes under the same load, on real servers or in the simulator.

    none         one request at a time
    static       when the device is free, the waiting requests form a batch, which runs to its longest end
    dynamic      a batch starts when it is full or has waited long enough; the next one waits until it has ended
    continuous   requests join and leave at any step; each reserves contiguous memory for its maximum length
    paged        as continuous, but blocks are allocated on demand (paged attention)

Clients in a closed loop send prompts of 64 to 256 random tokens and ask for 64, 128 or 256 tokens; end tokens are
ignored. The mean prompt has 160 tokens, as in the conversations of ShareGPT (161: Kwon et al. 2023). Prompts and
lengths depend only on the seed, so every mode gets the same requests. The program checks that all modes return the same
text.

The results of static and dynamic batching depend on ``--batch-size``. A larger batch serves more clients at a time, but
each of them waits for the longest request of the batch.
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
from performance.program import UsageError, exits_with_errors, new_parser, positive, write_json
from performance.simulation.presets import PRESETS
from performance.simulation.recording import fit_recording
from performance.simulation.runs import NOWHERE, simulate
from performance.simulation.setup import make_setup, simulated_config
from performance.simulation.workload import ClosedLoop, SimulatedRequest

DEFAULT_MODES = ("static", "dynamic", "continuous", "paged")


@exits_with_errors
def main(arguments: Sequence[str] | None = None, program: Path = START_SERVER) -> int:
    """Returns 0; 1 if requests failed or texts differ between modes; 2 if a server did not start."""
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
    """Simulates the load in one mode. Raises ConfigError, or UsageError if the recording does not fit."""
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
