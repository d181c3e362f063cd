"""Runs seeded models with the adapters of the golden files of PEFT. Prints tokens and log-probabilities as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("", "agent", "lora"))]

from adapted_driver import SLOT, continued, load_adapter  # noqa: E402
from step_driver import Sampled, StepDriver  # noqa: E402

from llm_serving.ipc.shm import NO_ADAPTER  # noqa: E402
from performance.models.adapter import ADAPTED, NUM_TOKENS, seeded_tensors  # noqa: E402
from performance.models.folders import write_model  # noqa: E402
from performance.models.variants import FAMILY_VARIANTS, VARIANTS  # noqa: E402
from support.adapted_models import ADAPTERS  # noqa: E402
from support.lora_folders import write_adapter  # noqa: E402
from support.lora_golden import lora_golden  # noqa: E402
from support.step_config import make_config  # noqa: E402


def described(outputs: list[Sampled]) -> dict[str, Any]:
    return {"tokens": [each.token for each in outputs], "logprobs": [each.logit - each.logsumexp for each in outputs]}


def results_of(model: str) -> dict[str, Any]:
    golden, folder = lora_golden(model), Path.cwd() / model
    write_model({**VARIANTS, **FAMILY_VARIANTS}[model], folder)
    adapter = write_adapter(folder / "adapter", golden["config"], seeded_tensors(golden["shapes"]))
    driver = StepDriver(make_config(folder, "float32", "fused", extra=ADAPTERS))
    load_adapter(driver, adapter)
    prompts = [case["prompt"] for case in golden["cases"]]
    both = continued(driver, prompts * 2, [SLOT] * len(prompts) + [NO_ADAPTER] * len(prompts), NUM_TOKENS)
    found = [described(outputs) for outputs in both]
    return {"adapted": found[: len(prompts)], "without": found[len(prompts) :]}


def main() -> None:
    print(json.dumps({model: results_of(model) for model in ADAPTED}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
