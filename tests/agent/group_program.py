"""Functions that are common to the programs that run one agent of a group.

python tests/agent/PROGRAM RANK JSON

The argument JSON has ``setup``, the fields of ``agent_group.Setup``, and ``models``. Each model has a name, a folder
and the name of its exchange, which is null for an agent without a group.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from step_driver import StepDriver

from llm_serving.ipc.exchange import ExchangeLayout, ExchangeMemory
from support.agent_group import Setup


def start_driver(setup: Setup, model: dict[str, Any], rank: int) -> StepDriver:
    """Loads a model in this agent and attaches the exchange of its group, if there is one."""
    config, exchange = setup.config(Path(model["folder"])), None
    if model["exchange"] is not None:
        layout = ExchangeLayout.of(config.shape, config.slot_limits(), config.parallel_config)
        exchange = ExchangeMemory.attach(model["exchange"], layout)
    return StepDriver(config, rank, exchange)


def print_models(run_model: Callable[[Setup, dict[str, Any], int], dict[str, Any]]) -> None:
    """Prints the results of ``run_model`` for all models as JSON, and ends the process."""
    rank, job = int(sys.argv[1]), json.loads(sys.argv[2])
    setup = Setup(**job["setup"])
    print(json.dumps({model["name"]: run_model(setup, model, rank) for model in job["models"]}), flush=True)
    os._exit(0)
