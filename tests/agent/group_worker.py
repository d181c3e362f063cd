"""Runs one agent of a group in a separate process and prints its results as JSON.

All agents of the group run the same steps. Only the results of the agent that samples are valid. ``group_program``
describes the arguments.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from group_program import print_models, start_driver  # noqa: E402
from runner_worker import expected_tokens, generate, penalised, run_invariance  # noqa: E402
from step_driver import StepDriver  # noqa: E402

from agent.scores import whole_logits  # noqa: E402
from performance.kernels.library import replace_product_library  # noqa: E402
from performance.kernels.routes import Routes, recorded_routes  # noqa: E402
from support.agent_group import Setup  # noqa: E402
from support.golden_files import golden_of  # noqa: E402

PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 0.6, "frequency_penalty": 0.9}
PROMPT, NUM_PENALISED = [5, 6, 7, 5, 9, 11], 12


def run_model(setup: Setup, model: dict[str, Any], rank: int) -> dict[str, Any]:
    if "routes" in model:
        replace_product_library()
    golden, driver = golden_of(model["name"]), start_driver(setup, model, rank)
    result: dict[str, Any] = {"summary": driver.runner.summary()}
    for way in (each for each in ("free", "forced") if each in model["ways"]):
        recorded = way == "forced" and "routes" in model
        with recorded_routes(model["routes"]) if recorded else nullcontext(Routes()) as routes:
            steps = generate(driver, golden["cases"], forced=way == "forced")
        result[way] = [[step[index].token for step in steps] for index in range(len(golden["cases"]))]
        if way == "forced":
            result["best"] = [
                [(step[index].top_ids, step[index].top_logits) for step in steps]
                for index in range(len(golden["cases"]))
            ]
            result["routes"], result["route_margin"] = routes.chosen, routes.widest_margin
    if "invariance" in model["ways"]:
        result["invariance"] = run_invariance(driver, golden)
    if "penalised" in model["ways"]:
        result["penalised"] = run_penalised(driver)
    return result


def run_penalised(driver: StepDriver) -> dict[str, Any]:
    """Runs steps with penalties and returns the chosen tokens.

    If this agent samples, also returns the tokens that NumPy chooses from the same logits with these penalties.
    """
    sampler, captured = driver.runner._sampler, []
    original = sampler.sample

    def capture(scores: Any, slot: Any) -> None:
        original(scores, slot)
        if slot.do_sample[: slot.num_seqs].any():  # a step in which no sequence samples has no logits
            captured.append(whole_logits(scores, slot.num_seqs))

    sampler.sample = capture  # type: ignore[method-assign]
    driver.runner.reset()
    chosen = penalised(driver, PROMPT, [], NUM_PENALISED, PENALTIES, row=3)
    sampler.sample = original  # type: ignore[method-assign]
    logits = [each[0] for each in captured]
    return {"chosen": chosen, "expected": expected_tokens(logits, PROMPT, PENALTIES)}


if __name__ == "__main__":
    print_models(run_model)
