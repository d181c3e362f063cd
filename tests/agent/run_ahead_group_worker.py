"""Runs one agent of a group, with or without running ahead, and prints the results as JSON.

The name of the model decides: ``plain`` waits for each step, and ``ahead`` runs on an artificial device, which finishes
a step after 1 ms. ``group_program`` describes the arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("", "agent"))]

from group_program import print_models, start_driver  # noqa: E402
from run_ahead_program import greedy_plan, plan, random_sampling, run_steps  # noqa: E402

from performance.artificial_device.ops import use_artificial_device  # noqa: E402
from performance.artificial_device.queue import ArtificialDevice, QueuedLaunch, Run  # noqa: E402
from support.agent_group import Setup  # noqa: E402

SPOILED = 8
"""The step that fails in the last run."""


class NotedDevice(ArtificialDevice):
    """Takes note of the results that the host copies from the launches."""

    def launch(self, run: Run, fetched: slice) -> QueuedLaunch:
        copied.add((fetched.start, fetched.stop))
        return super().launch(run, fetched)


copied: set[tuple[int | None, int | None]] = set()


def run_model(setup: Setup, model: dict[str, Any], rank: int) -> dict[str, Any]:
    if model["name"] == "ahead":
        use_artificial_device(NotedDevice(device_s=0.001))
    driver = start_driver(setup, model, rank)
    found: dict[str, Any] = {
        "greedy": run_steps(driver, greedy_plan()),
        "mixed": run_steps(driver, list(plan(random_sampling, moves=True))),
    }
    found["copied"] = sorted(copied, key=str)
    for reader in driver.runner._readers:
        reader._num_blocks *= 2**20  # the readers then accept numbers of blocks that do not exist
    return found | {"failing": run_steps(driver, greedy_plan(), spoil=SPOILED)}


if __name__ == "__main__":
    print_models(run_model)
