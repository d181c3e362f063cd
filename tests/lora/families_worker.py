"""Runs models with a LoRA adapter, and the same models with the adapter merged into their weights. Prints JSON.

python tests/lora/families_worker.py SCRATCH_FOLDER MODEL ...
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "agent")]

from step_driver import Part, Sampled, StepDriver, blocks_for  # noqa: E402

from llm_serving.ipc.shm import NO_ADAPTER  # noqa: E402
from llm_serving.lora.loading import read_into_memory  # noqa: E402
from llm_serving.model.shape import ModelShape  # noqa: E402
from performance.models.folders import write_model, write_safetensors  # noqa: E402
from performance.models.variants import FAMILY_VARIANTS  # noqa: E402
from support.lora_folders import random_adapter  # noqa: E402
from support.step_config import make_config  # noqa: E402

SLOT, SCALE = 1, 2.0
STEPS = 12
ADAPTERS = {"lora_config.max_adapters": 2, "lora_config.max_rank": 8}


def merge(folder: Path, adapter: Path) -> None:
    """Adds the adapter to the weights of a float32 folder, as PEFT's ``merge_and_unload`` does: W + scale x B x A."""
    weights, matrices = load_file(folder / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in matrices.items():
        if name.endswith(".lora_A.weight"):
            tensor = name.removeprefix("base_model.model.").replace(".lora_A", "")
            b = matrices[name.replace("lora_A", "lora_B")]
            change = SCALE * (b.astype(np.float64) @ a.astype(np.float64))
            weights[tensor] = (weights[tensor] + change).astype(np.float32)
    write_safetensors(folder / "model.safetensors", weights)


def continued(driver: StepDriver, prompts: list[list[int]], adapters: list[int]) -> list[list[Sampled]]:
    """Returns the greedy continuations of prompts that are computed together. Each prompt may have an adapter."""
    driver.runner.reset()
    if driver.config.lora_config.max_adapters:
        driver.slot.adapters[: len(prompts)] = adapters
    blocks = [blocks_for(index) for index in range(len(prompts))]
    steps = [driver.prefill(*[Part(prompt, 0, blocks[row], row) for row, prompt in enumerate(prompts)])]
    for step in range(1, STEPS):
        parts = [
            Part([steps[-1][row].token], len(prompt) + step - 1, blocks[row], row, sample_position=step)
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


def results_of(name: str, scratch: Path) -> dict[str, Any]:
    variant = replace(FAMILY_VARIANTS[name], dtype="float32", num_shards=1)
    base, merged = scratch / name / "base", scratch / name / "merged"
    for folder in (base, merged):
        write_model(variant, folder)
    adapter = random_adapter(scratch / name / "adapter", ModelShape.from_path(base), seed=5)
    merge(merged, adapter)
    prompts = np.random.default_rng(7).integers(3, variant.config["vocab_size"], (2, 60)).tolist()
    driver = StepDriver(make_config(base, "float32", "fused", extra=ADAPTERS))
    _, memory = read_into_memory(adapter, driver.config)
    driver.runner.load_adapter(SLOT, memory.name, memory.num_bytes)
    memory.close()
    alone = [continued(driver, [prompts[0]], [slot])[0] for slot in (SLOT, NO_ADAPTER)]
    mixed = continued(driver, [prompts[0], prompts[0], prompts[1]], [NO_ADAPTER, SLOT, SLOT])
    plain = continued(StepDriver(make_config(base, "float32", "fused")), prompts[:1], [NO_ADAPTER])[0]
    oracle = continued(StepDriver(make_config(merged, "float32", "fused")), prompts[:1], [NO_ADAPTER])[0]
    found = {"adapted": alone[0], "unadapted": alone[1], "mixed unadapted": mixed[0], "mixed adapted": mixed[1],
             "plain": plain, "merged": oracle}  # fmt: skip
    return {key: described(outputs) for key, outputs in found.items()}


def main() -> None:
    scratch, *models = sys.argv[1:]
    print(json.dumps({name: results_of(name, Path(scratch)) for name in models}))


if __name__ == "__main__":
    main()
