"""Computes one sequence of a model with linear attention in ways that matter for its states only."""

from __future__ import annotations

from typing import Any

from step_driver import Part, StepDriver, blocks_for

from llm_serving.errors import ProtocolError

STEPS = 6


def run_states(driver: StepDriver, golden: dict[str, Any]) -> dict[str, Any]:
    """Returns the digests of some output positions for each way, and the text of the error for a missing state."""
    case = golden["cases"][-1]
    prompt, forced = case["prompt"], case["tokens"][:STEPS]
    return {
        "plain": _plain(driver, prompt, forced, times=1),
        "every step twice": _plain(driver, prompt, forced, times=2),
        "checked rows": _checked(driver, prompt, forced),
        "entries of one row": _entries(driver, prompt, forced),
        "refused": _refused(driver, len(prompt)),
    }


def _plain(driver: StepDriver, prompt: list[int], forced: list[int], *, times: int) -> list[str]:
    blocks = blocks_for(0)
    for _ in range(times):
        outputs = driver.prefill(Part(prompt, 0, blocks, row=5))
    for step, token in enumerate(forced):
        for _ in range(times):
            output = driver.decode(Part([token], len(prompt) + step, blocks, row=5))
        outputs += output
    return [output.digest for output in outputs]


def _checked(driver: StepDriver, prompt: list[int], forced: list[int]) -> list[str]:
    """Decodes together with another sequence. Each step computes one of the two again, alone."""
    parts = [Part(prompt[:7], 0, blocks_for(1), row=0), Part(prompt, 0, blocks_for(2), row=1)]
    digests = [driver.prefill(*parts)[1].digest]
    for step, token in enumerate(forced):
        decodes = [Part([token], len(part.tokens) + step, part.blocks, part.row) for part in parts]
        digests.append(driver.decode(*decodes, checked_row=1 + step % 2)[1].digest)
    return digests


def _entries(driver: StepDriver, prompt: list[int], forced: list[int]) -> list[str]:
    """Computes three output tokens in each decode step, in three entries of one batch row."""
    blocks = blocks_for(3)
    outputs = driver.prefill(Part(prompt, 0, blocks, row=2))
    for first in range(0, len(forced), 3):
        entries = [
            Part([token], len(prompt) + first + place, blocks, row=2)
            for place, token in enumerate(forced[first : first + 3])
        ]
        outputs += driver.decode(*entries)
    return [output.digest for output in outputs]


def _refused(driver: StepDriver, position: int) -> str:
    driver.runner.reset()
    try:
        driver.decode(Part([5], position, blocks_for(0), row=5))
    except ProtocolError as error:
        return str(error)
    return "no error"
