"""Runs steps of a StepDriver whose sequences have a LoRA adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from step_driver import Part, Sampled, StepDriver, blocks_for

from llm_serving.ipc.shm import LAST_TOKEN, NO_ADAPTER
from llm_serving.lora.loading import read_into_memory

SLOT = 1
STEPS = 12


def continued(
    driver: StepDriver, prompts: list[list[int]], adapters: list[int], num_tokens: int = STEPS
) -> list[list[Sampled]]:
    """Returns the greedy continuations of prompts that are computed together. Each prompt may have an adapter."""
    driver.runner.reset()
    rows = [(blocks_for(row), row) for row in range(len(prompts))]
    steps = [
        driver.prefill(*[Part(prompt, 0, *rows[row], adapter=adapters[row]) for row, prompt in enumerate(prompts)])
    ]
    for step in range(1, num_tokens):
        parts = [
            Part([LAST_TOKEN], len(prompt) + step - 1, *rows[row], sample_position=step, adapter=adapters[row])
            for row, prompt in enumerate(prompts)
        ]
        steps.append(driver.decode(*parts))
    return [[step[row] for step in steps] for row in range(len(prompts))]


def described(outputs: list[Sampled]) -> dict[str, Any]:
    return {
        "tokens": [each.token for each in outputs],
        "logits": [each.logit for each in outputs],
        "digests": [each.digest for each in outputs],
    }


def load_adapter(driver: StepDriver, adapter: Path, slot: int = SLOT) -> None:
    """Loads an adapter's folder into an adapter slot. The agent of a group loads its part of the adapter."""
    _, memory = read_into_memory(adapter, driver.config)
    driver.runner.load_adapter(slot, memory.name, memory.num_bytes)
    memory.close()


def adapted_results(driver: StepDriver, prompts: list[list[int]]) -> dict[str, list[Sampled]]:
    """Returns the continuations of the first prompt with and without an adapter, alone and in a batch."""
    alone = [continued(driver, [prompts[0]], [slot])[0] for slot in (SLOT, NO_ADAPTER)]
    mixed = continued(driver, [prompts[0], prompts[0], prompts[1]], [NO_ADAPTER, SLOT, SLOT])
    return {"adapted": alone[0], "unadapted": alone[1], "mixed unadapted": mixed[0], "mixed adapted": mixed[1]}
