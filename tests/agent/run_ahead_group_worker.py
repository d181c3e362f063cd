"""Runs one agent of a group, with or without running ahead, and prints the results as JSON.

The name of the model decides: ``plain`` waits for each step, and ``ahead`` runs on an artificial device, which finishes
a step after 1 ms. The next models must follow ``ahead``, because they run its graphs, in a new group. ``drawn 0`` and
``drawn 1`` run only steps with a temperature. One of these steps fails in the agent with this rank. With ``moved 0``,
block moves fail in the agent with rank 0. ``group_program`` describes the arguments.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("", "agent"))]

from group_program import print_models, start_driver  # noqa: E402
from run_ahead_program import (  # noqa: E402
    GREEDY,
    IN_FLIGHT,
    RANDOM_RUNS,
    Parts,
    Step,
    alternating_plan,
    device_of,
    drawn_sampling,
    draws_allowed,
    failing_moves,
    greedy_plan,
    mixed_plan,
    pad,
    plan,
    run_steps,
    whole_sampling,
)
from step_driver import Part, StepDriver, blocks_for  # noqa: E402

from agent.model_start import ModelStart  # noqa: E402
from agent.row_check import RowCheckError  # noqa: E402
from llm_serving.errors import GroupDownError, SamplingFailedError  # noqa: E402
from llm_serving.ipc.messages import Decode, Prefill  # noqa: E402
from llm_serving.ipc.shm import LAST_TOKEN  # noqa: E402
from performance.artificial_device.ops import use_artificial_device  # noqa: E402
from performance.artificial_device.queue import ArtificialDevice, QueuedLaunch, Run  # noqa: E402
from support.agent_group import Setup  # noqa: E402
from support.time_limits import time_limit  # noqa: E402

SPOILED = 8
"""The number of the step that fails in the last run."""
UNSAMPLED = 1
"""The number of the step whose sampling fails in ``run_unsampled``."""


class NotedDevice(ArtificialDevice):
    """Takes note of all launches, and of the results that the host copies from them."""

    def launch(self, run: Run, fetched: slice) -> QueuedLaunch:
        copied.add((fetched.start, fetched.stop))
        launches.append(super().launch(run, fetched))
        return launches[-1]


copied: set[tuple[int | None, int | None]] = set()
launches: list[QueuedLaunch] = []
compiled: list[tuple[Any, Any]] = []
"""The loaded model and the graphs of the run ``ahead``."""


def run_model(setup: Setup, model: dict[str, Any], rank: int) -> dict[str, Any]:
    await_launches()
    if compiled:
        return run_failing_in_one(setup, model, rank)
    device = NotedDevice(device_s=0.001)
    if model["name"] == "ahead":
        use_artificial_device(device)
    driver = start_driver(setup, model, rank)
    if model["name"] == "ahead":
        compiled.append((driver.runner._model, driver.runner._graph))
    found: dict[str, Any] = {
        "greedy": run_steps(driver, greedy_plan()),
        "mixed": run_steps(driver, mixed_plan()),
        "alternating": run_steps(driver, alternating_plan()),
        "drawn": run_steps(driver, list(plan(drawn_sampling))),
    }
    with draws_allowed(1):
        found["whole"] = run_steps(driver, list(plan(whole_sampling)))
    found["copied"] = sorted(copied, key=str)
    found["checked"] = run_checked(driver)
    found["unsampled"] = run_unsampled(driver, rank)
    if model["name"] == "ahead":
        found |= run_wrong_draws(driver, device, rank)
        device.captures = True
        pad(driver)
        captured = {"greedy": greedy_plan(), "alternating": alternating_plan(), "drawn": list(plan(drawn_sampling))}
        found["captured"] = {name: run_steps(driver, steps) for name, steps in captured.items()}
    return found | run_failing(driver, greedy_plan())


def run_failing_in_one(setup: Setup, model: dict[str, Any], rank: int) -> dict[str, Any]:
    """Runs steps of which one fails in one agent.

    The group of the earlier runs has failed. This agent is in a new group, and runs the graphs that it has compiled for
    the earlier one.
    """
    loaded, graph = compiled[0]
    with mock.patch.multiple(ModelStart, load=lambda *_: loaded, stored_graph=lambda *_: graph):
        driver = start_driver(setup, model, rank)
    device_of(driver).captures = False  # the last run of ``ahead`` has captured its launches
    if model["name"].startswith("drawn"):
        return run_failing_drawn(driver, fails=model["name"] == f"drawn {rank}")
    with failing_moves(driver.runner) if model["name"] == f"moved {rank}" else nullcontext():
        return {"failing": run_steps(driver, mixed_plan())}


def run_failing(driver: StepDriver, steps: list[Step]) -> dict[str, Any]:
    """Runs steps of which one fails in both agents."""
    for reader in driver.runner._readers:
        reader._num_blocks *= 2**20  # the readers then accept numbers of blocks that do not exist
    return {"failing": run_steps(driver, steps, spoil=SPOILED)}


def run_failing_drawn(driver: StepDriver, *, fails: bool) -> dict[str, Any]:
    """Runs steps with a temperature, of which one fails in this agent if ``fails`` is True.

    Notes whether the agent learns of the end of its group while it waits for the tokens of a step.
    """
    for reader in driver.runner._readers:
        reader._num_blocks *= 2**20  # the readers then accept numbers of blocks that do not exist
    tokens = driver.runner._last_tokens
    assert tokens is not None
    of_step, ended = tokens.of_step, []

    def noted(*arguments: Any) -> Any:
        try:
            return of_step(*arguments)
        except GroupDownError:
            ended.append(True)
            raise

    tokens.of_step = noted  # type: ignore[method-assign]
    found = run_steps(driver, list(plan(drawn_sampling)), spoil=SPOILED if fails else -1)
    return {"failing": found | {"ended_in_wait": bool(ended)}}


def run_unsampled(driver: StepDriver, rank: int) -> list[dict[str, Any]]:
    """Runs the same steps several times. The first run is right. In all others, the sampling of one step fails.

    In the last two runs, one agent gets each step after it has sampled the previous step.
    """
    part = Parts(np.random.default_rng(7), lambda row: GREEDY | {"temperature": 0.9, "top_k": 20, "seed": 11 + row})
    steps = [Step(Prefill, [part(0), part(1), part(2)]), Step(Decode, [part(0), part(1), part(2)])]
    steps += [Step(Decode, [part(0), part(1)]), Step(Prefill, [part(3), part(4)])]
    steps += [Step(Decode, [part(3), part(4)]) for _ in range(4)]
    runs = [run_steps(driver, steps), run_steps(driver, steps, unsampled=UNSAMPLED)]
    for late in range(2):
        in_flight = 1 if rank == late else IN_FLIGHT
        runs.append(run_steps(driver, steps, in_flight=in_flight, unsampled=UNSAMPLED))
    return runs


def run_wrong_draws(driver: StepDriver, device: NotedDevice, rank: int) -> dict[str, Any]:
    """Runs sequences with a temperature, some of which get wrong tokens from a device.

    - ``wrong``, by rank: the device of this agent draws wrong tokens in every third step.
    - ``late``, by rank: this agent gets each step after it has sampled the previous step. The other agent gets the step
      earlier. The first agent's device draws wrong tokens in every third step.
    - ``sometimes``, by seed: the devices draw tokens without ``top_k`` in a random part of all steps. Half of the first
      agent's draws are wrong.
    """
    drawn, whole = list(plan(drawn_sampling)), list(plan(whole_sampling))
    found: dict[str, Any] = {"wrong": [], "late": [], "sometimes": []}
    for other in range(2):
        device.wrong_every = 3 if rank == other else 0
        found["wrong"].append(run_steps(driver, drawn))
    device.wrong_every = 3 if rank == 0 else 0
    for late in range(2):
        found["late"].append(run_steps(driver, drawn, in_flight=1 if rank == late else IN_FLIGHT))
    device.wrong_every = 2 if rank == 0 else 0
    for seed in range(RANDOM_RUNS):
        with draws_allowed(0.6, seed):
            found["sometimes"].append(run_steps(driver, whole, in_flight=1 if rank == seed % 2 else IN_FLIGHT))
    device.wrong_every = 0
    return found


def run_checked(driver: StepDriver) -> dict[str, Any]:
    """Runs a prompt step and a checked decode step, each of which must end before the next one starts.

    Returns the tokens, the error of the check, and the number of launches that the device still computes after each
    step. Then runs the decode step again, but its sampling fails, and after it the prompt step. Returns this error and
    the tokens of the last step, too.
    """
    driver.runner.reset()
    prompts = [[7, 8, 9, 10, 11], [50, 51, 52], [120, 121, 122, 123]]
    parts = [Part(prompt, 0, blocks_for(row, 64), row) for row, prompt in enumerate(prompts)]
    tokens, error = [[each.token for each in driver.prefill(*parts)]], ""
    running = [num_running()]
    later = [replace(part, tokens=[LAST_TOKEN], start=len(part.tokens), sample_position=1) for part in parts]
    try:
        tokens.append([each.token for each in driver.decode(*later, checked_row=2)])
    except RowCheckError as problem:
        error = str(problem)
    running.append(num_running())
    failed = ""
    driver.slot.mask_number[0] = 1
    try:
        driver.decode(*later, checked_row=2)
    except SamplingFailedError as problem:
        failed = str(problem)
    driver.slot.mask_number[0] = 0
    again = [each.token for each in driver.prefill(*parts)]
    return {"tokens": tokens, "error": error, "running": running, "failed": failed, "again": again}


def await_launches() -> None:
    """Waits for all launches of earlier models. MindSpore cannot compile a graph while another thread runs one.

    A run that ends with a failed step leaves launches behind.
    """
    for launch in launches:
        assert launch._is_done.wait(time_limit(60.0)), "a launch of an earlier model does not end"
    launches.clear()


def num_running() -> int:
    return sum(not launch._is_done.is_set() for launch in launches)


if __name__ == "__main__":
    print_models(run_model)
