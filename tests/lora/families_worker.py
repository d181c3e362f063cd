"""Runs models with a LoRA adapter, and the same models with the adapter merged into their weights. Prints JSON.

python tests/lora/families_worker.py SCRATCH_FOLDER MODEL ...
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("", "agent", "lora"))]

from adapted_driver import adapted_results, continued, described, load_adapter  # noqa: E402
from step_driver import StepDriver  # noqa: E402

from llm_serving.ipc.shm import NO_ADAPTER  # noqa: E402
from llm_serving.model.shape import ModelShape  # noqa: E402
from performance.models.folders import write_model  # noqa: E402
from performance.models.variants import FAMILY_VARIANTS, Variant  # noqa: E402
from support.adapted_models import ADAPTERS, merge, prompts_of  # noqa: E402
from support.agent_group import with_layers  # noqa: E402
from support.lora_folders import random_adapter  # noqa: E402
from support.step_config import make_config  # noqa: E402


def with_each_kind_of_layer(variant: Variant) -> Variant:
    """Returns the model with its first layers, up to the first layer of its last kind. They have all kinds of layers.

    The comparison is with the merged weights of the same layers, and further layers repeat them. There are at least two
    layers, so that a layer with the adapter of another layer makes the comparison fail.
    """
    kinds = variant.config.get("layer_types", ["the only kind"])
    return with_layers(variant, max(2, 1 + max(kinds.index(kind) for kind in set(kinds))))


def results_of(name: str, scratch: Path) -> dict[str, Any]:
    variant = replace(with_each_kind_of_layer(FAMILY_VARIANTS[name]), dtype="float32", num_shards=1)
    base, merged = scratch / name / "base", scratch / name / "merged"
    for folder in (base, merged):
        write_model(variant, folder)
    adapter = random_adapter(scratch / name / "adapter", ModelShape.from_path(base), seed=5)
    merge(merged, adapter)
    prompts = prompts_of(variant)
    driver = StepDriver(make_config(base, "float32", "fused", extra=ADAPTERS))
    load_adapter(driver, adapter)
    plain = continued(StepDriver(make_config(base, "float32", "fused")), prompts[:1], [NO_ADAPTER])[0]
    oracle = continued(StepDriver(make_config(merged, "float32", "fused")), prompts[:1], [NO_ADAPTER])[0]
    found = adapted_results(driver, prompts) | {"plain": plain, "merged": oracle}
    return {key: described(outputs) for key, outputs in found.items()}


def main() -> None:
    scratch, *models = sys.argv[1:]
    print(json.dumps({name: results_of(name, Path(scratch)) for name in models}))


if __name__ == "__main__":
    main()
