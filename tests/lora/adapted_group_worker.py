"""Runs one agent of a group with a LoRA adapter in a separate process and prints its results as JSON.

All agents of the group run the same steps. Only the results of the agent that samples are valid. The adapter is in a
subfolder of the model's folder. ``tests/agent/group_program.py`` describes the arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("", "lora", "agent"))]

from adapted_driver import adapted_results, continued, described, load_adapter  # noqa: E402
from group_program import print_models, start_driver  # noqa: E402

from llm_serving.ipc.shm import NO_ADAPTER  # noqa: E402
from performance.models.variants import FAMILY_VARIANTS  # noqa: E402
from support.adapted_models import ADAPTER, prompts_of  # noqa: E402
from support.agent_group import Setup  # noqa: E402


def run_model(setup: Setup, model: dict[str, Any], rank: int) -> dict[str, Any]:
    driver, folder = start_driver(setup, model, rank), Path(model["folder"])
    prompts = prompts_of(FAMILY_VARIANTS[model["name"]])
    if setup.extra:
        load_adapter(driver, folder / ADAPTER)
        found = adapted_results(driver, prompts)
    else:
        found = {"plain": continued(driver, prompts[:1], [NO_ADAPTER])[0]}
    return {key: described(outputs) for key, outputs in found.items()}


if __name__ == "__main__":
    print_models(run_model)
