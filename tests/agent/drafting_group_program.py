"""Runs one of two agents that share a model and have a draft model, which is the model itself. Prints the results.

``group_program`` describes the arguments. Only the results of the agent that samples are valid.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from group_program import print_models, start_driver  # noqa: E402
from step_driver import Part, StepDriver, blocks_for  # noqa: E402

from agent.backends.cpu.ops import FusedCpuOps  # noqa: E402
from agent.model_runner import ModelRunner  # noqa: E402
from llm_serving.ipc.shm import HEADER, LAST_TOKEN  # noqa: E402
from support.agent_group import Setup  # noqa: E402
from support.golden_files import golden_of  # noqa: E402

WIDTH = 4
DRAFTED, FAILED = 20, 8
"""Numbers of decode steps: with drafts, and after the draft model has failed."""


class Sequence:
    """A greedy sequence in batch row 0. Each step takes the token that the previous step has sampled."""

    def __init__(self, driver: StepDriver, prompt: list[int]) -> None:
        self._driver = driver
        self._prompt = prompt
        self.tokens: list[int] = []
        self.drafts: list[list[int]] = []
        """The drafts that each step has made."""

    def prefill(self) -> None:
        self._run(Part(self._prompt, 0, blocks_for(0), 0), decode=False)

    def decode(self, *, checks: bool) -> None:
        """Runs a step that wants drafts, with a row check if ``checks``."""
        self._run(self._next(), decode=True, checks=checks)

    def break_step(self) -> str:
        """Runs a step with a row check, in which the drafter has a defect. Returns the error."""
        drafter = self._driver.runner._drafter
        if drafter is not None:
            after_step, drafter.after_step = drafter.after_step, _raise_index_error  # type: ignore[method-assign]
        try:
            self._run(self._next(), decode=True, checks=True)
        except IndexError as error:
            return str(error)
        finally:
            if drafter is not None:
                drafter.after_step = after_step  # type: ignore[method-assign]
        return ""

    def _next(self) -> Part:
        place = len(self.tokens) - 1
        return Part([LAST_TOKEN], len(self._prompt) + place, blocks_for(0), 0, sample_position=place + 1)

    def _run(self, part: Part, *, decode: bool, checks: bool = False) -> None:
        slot = self._driver.fill([part], checked_row=int(checks))
        slot.restarts[0] = not decode
        slot.header[HEADER["num_wanted"]] = WIDTH
        try:
            self._driver.runner.run_step(slot, is_decode=decode)
        finally:
            self.tokens.append(int(slot.sampled_ids[0]))
            self.drafts.append(slot.draft_ids[:WIDTH].tolist())


def _raise_index_error(*arguments: object) -> int:
    raise IndexError("a defect of the drafter")


def _raise_runtime_error(*arguments: object) -> None:
    raise RuntimeError("an operator of the draft model failed")


def _overwrite_logits(runner: ModelRunner) -> None:
    """Makes the drafter overwrite the model's logits after each step, as a draft model of native operators may do."""
    drafter, ops = runner._drafter, runner._model.ops  # type: ignore[union-attr]
    if drafter is None or not isinstance(ops, FusedCpuOps):
        return
    after_step = drafter.after_step

    def overwrite(*arguments: Any) -> int:
        draft_us = after_step(*arguments)
        ops.logits.fill(0)
        return draft_us

    drafter.after_step = overwrite  # type: ignore[method-assign]


def run_model(setup: Setup, model: dict[str, Any], rank: int) -> dict[str, Any]:
    driver = start_driver(setup, model, rank)
    runner = driver.runner
    _overwrite_logits(runner)
    sequence = Sequence(driver, golden_of(model["name"])["cases"][0]["prompt"])
    sequence.prefill()
    for number in range(DRAFTED):
        sequence.decode(checks=number % 4 == 1)
    error = sequence.break_step()
    if runner._drafter is not None:
        runner._drafter._network.run = _raise_runtime_error  # type: ignore[assignment, method-assign]
    for number in range(FAILED):
        sequence.decode(checks=number % 4 == 1)
    found = {"summary": runner.summary(), "has_drafter": runner._drafter is not None, "error": error}
    return {**found, "tokens": sequence.tokens, "drafts": sequence.drafts}


if __name__ == "__main__":
    print_models(run_model)
