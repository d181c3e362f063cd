"""Computes one sequence of a model with linear attention in several ways that use its recurrent states differently."""

from __future__ import annotations

from typing import Any

from step_driver import Part, StepDriver, blocks_for

from llm_serving.errors import ProtocolError
from support.step_config import BLOCK_SIZE

STEPS = 6


def run_states(driver: StepDriver, golden: dict[str, Any]) -> dict[str, Any]:
    """Returns the digests of some output positions for each way of computing them, and the error text for a missing
    state.
    """
    case = golden["cases"][-1]
    prompt, forced = case["prompt"], case["tokens"][:STEPS]
    return {
        "plain": _plain(driver, prompt, forced, times=1),
        "every step twice": _plain(driver, prompt, forced, times=2),
        "checked rows": _checked(driver, prompt, forced),
        "entries of one row": _entries(driver, prompt, forced),
        "after drafts": _drafted(driver, prompt, forced),
        "resumed from a prompt": _resumed(driver, prompt, forced, after=0),
        "resumed from a decode step": _resumed(driver, prompt, forced, after=1),
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


def _drafted(driver: StepDriver, prompt: list[int], forced: list[int]) -> list[str]:
    """Computes two drafts in each decode step, of which none, one or both are right.

    Each step runs twice, and another sequence is in the batch.
    """
    blocks, digests, done = blocks_for(3), [], 0
    other = driver.prefill(Part(prompt[:5], 0, blocks_for(1), row=1), Part(prompt, 0, blocks, row=2))
    digests.append(other[1].digest)
    for step, accepted in enumerate((0, 2, 1)):
        first = Part([7], 5 + step, blocks_for(1), row=1)
        tokens = [*forced[done : done + 1 + accepted], *[9, 11][accepted:]]
        entries = [Part([token], len(prompt) + done + place, blocks, row=2) for place, token in enumerate(tokens)]
        for _ in range(2):
            outputs = driver.decode(first, *entries)
        digests += [output.digest for output in outputs[1 : 2 + accepted]]
        done += 1 + accepted
    return digests


def _resumed(driver: StepDriver, prompt: list[int], forced: list[int], *, after: int) -> list[str]:
    """Saves the state at the end of a block within the prompt, or after one output token. Then computes the rest in
    another batch row, which resumes from the snapshot and reads the same blocks.

    A state may be saved after any token, so the decode step need not end a block.
    """
    blocks, known = blocks_for(4), [*prompt, *forced]
    position = len(prompt) + after if after else (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    saves = [(0, position, 1)] if not after else []
    digests = [driver.prefill(Part(prompt, 0, blocks, row=5), state_moves=saves)[0].digest]
    if after:
        digests.append(driver.decode(Part(forced[:1], len(prompt), blocks, row=5), state_moves=[(0, 1, 1)])[0].digest)
    # Other sequences overwrite both states of the first batch row.
    driver.prefill(Part(prompt[:9], 0, blocks_for(1), row=5))
    driver.decode(Part([7], 9, blocks_for(1), row=5))
    end = len(prompt) if not after else position + 1
    outputs = driver.prefill(Part(known[position:end], position, blocks, row=3), state_moves=[(0, 0, 1)])
    assert after or outputs[0].digest == digests.pop(), "the prompt's last token has other bits"
    digests += [output.digest for output in outputs]
    for place in range(end, len(known)):
        digests.append(driver.decode(Part([known[place]], place, blocks, row=3))[0].digest)
    return digests


def _refused(driver: StepDriver, position: int) -> str:
    driver.runner.reset()
    try:
        driver.decode(Part([5], position, blocks_for(0), row=5))
    except ProtocolError as error:
        return str(error)
    return "no error"
