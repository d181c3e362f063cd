"""The study of batching modes (``performance/load/batching.py``) in the simulator."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from performance.load.batching import Measured, mode_settings
from performance.load.options import LoadOptions
from performance.load.workload import LoadRequest
from performance.simulation.runs import NOWHERE, simulate
from performance.simulation.setup import make_setup, simulated_config
from performance.simulation.workload import ClosedLoop, SimulatedRequest

__all__ = ["simulate_mode"]


def simulate_mode(mode: str, requests: Sequence[LoadRequest], parsed: argparse.Namespace) -> Measured:
    """The load of the study under one mode. Raises ConfigError, or UsageError about the recording."""
    settings = [*mode_settings(mode, parsed.batch_size, parsed.batch_wait), *parsed.settings]
    fit = None
    if parsed.recording is not None:
        from performance.simulation.recording import fit_recording

        fit = fit_recording(parsed.recording, simulated_config(parsed.config, parsed.settings, parsed.simulate))
    setup = make_setup(parsed.config, settings, parsed.simulate, fit)
    asked = [SimulatedRequest(each.token_ids or (), each.max_tokens) for each in requests]
    options = LoadOptions(NOWHERE, seed=parsed.seed)
    run = simulate(mode, setup, ClosedLoop(asked, parsed.clients), options)
    return Measured(mode, run.figures, run.outcome.kv_waste)
