"""Runs LoRA adapters with native operators, and prints the results as JSON.

python tests/lora/native_program.py
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("", "agent", "lora"))]

from adapted_driver import SLOT, continued, described, load_adapter  # noqa: E402
from step_driver import StepDriver  # noqa: E402

from agent.backends.runtime import start_runtime  # noqa: E402
from agent.lora.stacked import StackedSlots  # noqa: E402
from agent.lora.store import ModuleAdapter, ParameterAdapter  # noqa: E402
from agent.models.names import weight_specs  # noqa: E402
from agent.weights.storage import Array, from_float32, to_float32  # noqa: E402
from llm_serving.errors import AgentError  # noqa: E402
from llm_serving.ipc.shm import NO_ADAPTER  # noqa: E402
from performance.models.folders import write_model  # noqa: E402
from performance.models.variants import FAMILY_VARIANTS  # noqa: E402
from support.adapted_models import ADAPTERS, prompts_of  # noqa: E402
from support.lora_folders import random_adapter  # noqa: E402
from support.step_config import make_config  # noqa: E402

MODEL = "qwen3_tied"
GROUPS, DEPTH, RANKS, WIDTH = 4, 160, 24, 96
EPSILONS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Distance between 1 and the next number."""


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    return from_float32(rng.standard_normal(shape).astype(np.float32), dtype)


def run_cell(dtype: str) -> dict[str, Any]:
    """Adds adapters in groups of several sizes. Compares with NumPy in float64, and each row with the row alone."""
    from agent.backends.native.adapters import AddAdapters
    from agent.layers.parameter import as_storage, as_tensor

    rng, cell = np.random.default_rng(1), AddAdapters()
    a, b = random(rng, (GROUPS, DEPTH, RANKS), dtype), random(rng, (GROUPS, RANKS, WIDTH), dtype)
    a[-1], b[-1] = 0, 0
    worst, same, unchanged = 0.0, True, True
    for counts in ([0, 3, 1, 2], [1, 0, 0, 0], [2, 5, 0, 9], [0, 0, 0, 4]):
        rows = sum(counts)
        x, out = random(rng, (rows, DEPTH), dtype), random(rng, (rows, WIDTH), dtype)

        def run(x: Array, out: Array, counts: list[int]) -> Array:
            given = (as_tensor(array) for array in (out, x, a, b))
            return as_storage(cell(*given, (as_tensor(np.array(counts, np.int64)),)))

        found, group = run(x, out, counts), np.repeat(np.arange(GROUPS), counts)
        for row in range(rows):
            one = np.eye(GROUPS, dtype=np.int64)[group[row]].tolist()
            same &= run(x[row : row + 1], out[row : row + 1], one).tobytes() == found[row].tobytes()
        unchanged &= found[group == GROUPS - 1].tobytes() == out[group == GROUPS - 1].tobytes()
        wide = [to_float32(array, dtype).astype(np.float64) for array in (x, out, a[group], b[group])]
        exact = wide[1] + ((wide[0][:, None] @ wide[2]) @ wide[3])[:, 0]
        size = np.abs(wide[1]) + ((np.abs(wide[0])[:, None] @ np.abs(wide[2])) @ np.abs(wide[3]))[:, 0]
        worst = max(worst, float((np.abs(to_float32(found, dtype) - exact) / size).max()))
    return {"error": worst / EPSILONS[dtype], "alone": same, "unchanged": unchanged}


def run_model(scratch: Path) -> dict[str, Any]:
    """Loads several adapters into one slot of a running model. Returns tokens and logits of both op tables."""
    variant = replace(FAMILY_VARIANTS[MODEL], dtype="float32", num_shards=1)
    folder = scratch / MODEL
    write_model(variant, folder)
    found: dict[str, Any] = {}
    for table, dtype in (("native", "float16"), ("fused", "float32")):
        driver = StepDriver(make_config(folder, dtype, table, extra=ADAPTERS))
        shape, prompts = driver.config.shape, prompts_of(variant)
        whole = random_adapter(scratch / "whole", shape, seed=5)
        modules = ["k_proj", "o_proj", "up_proj"]
        some = random_adapter(scratch / "some", shape, seed=6, rank=8, modules=modules, lora_alpha=20, use_rslora=True)
        for name, adapter in (("first", whole), ("second", some), ("again", whole)):
            load_adapter(driver, adapter)
            found[f"{table} {name}"] = described(continued(driver, prompts[:1], [SLOT])[0])
        found[f"{table} without"] = described(continued(driver, prompts[:1], [NO_ADAPTER])[0])
    return found


def run_device() -> dict[str, Any]:
    """Writes adapters into matrices with the calls of an Ascend, which MindSpore also supports on a CPU."""
    from agent.backends.ascend import adapters
    from agent.layers.parameter import bind, unbound_parameter

    config = make_config(ROOT / "models" / "tiny_llama", "bfloat16", "native", extra=ADAPTERS)
    spec = next(each for each in weight_specs(config.shape) if each.parameter.endswith("attention.output.weight"))
    layer = spec.parameter.removesuffix(".weight")
    rows, columns = spec.shape
    arrays = {f"{layer}.adapter_a": np.zeros((3, columns, 8), np.uint16),
              f"{layer}.adapter_b": np.zeros((3, 8, rows), np.uint16)}  # fmt: skip
    parameters = {name: unbound_parameter(array.shape, "bfloat16") for name, array in arrays.items()}
    for name, array in arrays.items():
        bind(parameters[name], array)
    rng = np.random.default_rng(2)
    a, b = random(rng, (4, columns), "bfloat16"), random(rng, (rows, 4), "bfloat16")
    given = {spec.parameter: ParameterAdapter(spec, (ModuleAdapter(slice(0, rows), 0.5, a, b),))}
    slots = StackedSlots(adapters.DeviceMatrices(parameters, creates=False), "bfloat16")
    slots.replace(1, given)
    first, second = arrays.values()
    half = from_float32(to_float32(b, "bfloat16") / 2, "bfloat16")
    right = bool((first[1, :, :4] == a.T).all() and (second[1, :4] == half.T).all() and not first[1, :, 4:].any())
    others = bool(first[[0, 2]].any() or second[[0, 2]].any())
    slots.replace(1, {})
    gone = not second[1].any()
    adapters.swap_cache = lambda *arguments: None
    try:
        slots.replace(1, given)
        error = "no error"
    except AgentError as problem:
        error = str(problem)
    return {"right": right, "other slots": others, "gone": gone, "lost": error}


def run_padding() -> dict[str, Any]:
    """Pads a decode of three sequences to eight. Returns the rows of each group, and the last tokens."""
    from agent.step_graph.adapter_order import AdapterOrder
    from agent.step_graph.dynamic import _padded_decode
    from agent.step_inputs import StepInputs

    ids = np.arange(3, dtype=np.int32)
    inputs = StepInputs(
        ids, ids, ids, ids.reshape(-1, 1), ids + 1, ids * 0 + 1, ids, ids, ids,
        adapters=np.array([NO_ADAPTER, 1, 0], np.int32), whole_prompts=False,
    )  # fmt: skip
    order = AdapterOrder(3, orders_entry=True)
    ordered, entry, _ = order.sorted(inputs, ids, None)
    padded, entry, _ = _padded_decode(ordered, entry, None, 8, 1)
    return {"rows": order.rows(padded.adapters).tolist(), "last": padded.last_tokens.tolist(), "entry": entry.tolist()}


def main() -> None:
    start_runtime(make_config(ROOT / "models" / "tiny_llama", "bfloat16", "native"))
    found = {f"cell {dtype}": run_cell(dtype) for dtype in EPSILONS}
    found |= {"model": run_model(Path.cwd()), "device": run_device(), "padding": run_padding()}
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
