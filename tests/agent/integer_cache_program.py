"""Runs the Cells of the native int8 KV cache, and prints as JSON how their results differ from NumPy.

python tests/agent/integer_cache_program.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from agent.backends.runtime import start_runtime  # noqa: E402
from support.model_folders import write_model_folder  # noqa: E402
from support.step_config import make_config  # noqa: E402

BLOCKS, BLOCK_SIZE, TOKENS, DIM = 6, 4, 9, 32


def main() -> None:
    start_runtime(make_config(write_model_folder(Path("model")), "float16", "native"))
    print(json.dumps({f"{dtype} {heads}": case(dtype, heads) for dtype in TYPES for heads in (1, 3, 8)}))


TYPES = ("float16", "bfloat16")


def case(dtype: str, heads: int) -> dict[str, Any]:
    """Writes random keys and values, gathers blocks, and returns the differences from exact arithmetic."""
    import mindspore as ms
    from mindspore import Parameter, Tensor, nn

    from agent.backends.base import AttentionForm
    from agent.backends.native.integer_cache import GatheredBlocks, IntegerCache, MultipliedOut
    from agent.layers.parameter import MINDSPORE_DTYPES
    from llm_serving.model.number_formats import scale_row_width

    form, kind = AttentionForm(heads, heads, DIM), MINDSPORE_DTYPES[dtype]
    rng = np.random.default_rng(heads)
    slots = rng.permutation(BLOCKS * BLOCK_SIZE)[:TOKENS].astype(np.int32)
    slots[4] = -1
    shape = (BLOCKS, BLOCK_SIZE, heads, DIM)
    sizes = ((shape, ms.int8), (shape, ms.int8), ((BLOCKS, BLOCK_SIZE, 1, scale_row_width(heads)), kind))

    class Step(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.caches = [Parameter(Tensor(np.zeros(size), of), name=f"c{i}") for i, (size, of) in enumerate(sizes)]
            self.first, self.second, self.third = self.caches
            self.write, self.gather = IntegerCache(form, dtype), GatheredBlocks(form, dtype)
            self.direct = MultipliedOut(form, dtype)

        def construct(self, key: Any, value: Any, slot_mapping: Any, blocks: Any) -> Any:
            caches = (self.first, self.second, self.third)
            keys, values, scales, written = self.write(key, value, caches, slot_mapping)
            return self.gather(caches, blocks, written), self.direct(keys, values, scales, (-1, heads * DIM))

    # Rows of very different size show whether each row and head has its own scale.
    rows = [rng.standard_normal((TOKENS, heads, DIM)) * np.exp(rng.normal(1, 1, (TOKENS, heads, 1))) for _ in "kv"]
    given = [Tensor(each.reshape(TOKENS, -1), kind) for each in rows]
    exact = [tensor.astype(ms.float32).asnumpy().reshape(TOKENS, heads, DIM).astype(np.float64) for tensor in given]
    order = rng.permutation(BLOCKS).astype(np.int32)
    gathered, direct = Step()(*given, Tensor(slots), Tensor(order))
    found: dict[str, Any] = {}
    for name, got, now, wanted in zip(("keys", "values"), gathered, direct, exact, strict=True):
        got = got.astype(ms.float32).asnumpy().reshape(BLOCKS * BLOCK_SIZE, heads, DIM)
        now = now.astype(ms.float32).asnumpy().reshape(TOKENS, heads, DIM)
        largest = np.abs(wanted).max(-1, keepdims=True)
        # DynamicQuantExt multiplies by 127 / largest in float32, which decides ties.
        integers = np.rint(wanted.astype(np.float32) * (np.float32(127) / largest.astype(np.float32)))
        product = integers.astype(np.float64) * (largest / 127)
        places = {int(block): place for place, block in enumerate(order)}
        at = [places[slot // BLOCK_SIZE] * BLOCK_SIZE + slot % BLOCK_SIZE for slot in slots.tolist() if slot >= 0]
        kept = slots >= 0
        found[name] = {
            "ulp": float(np.max(np.abs(now - product) / np.maximum(np.abs(product), 1e-3))),
            "same": bool(np.array_equal(got[at], now[kept])),
            "others": float(np.abs(np.delete(got, at, axis=0)).max()),
        }
    return found


if __name__ == "__main__":
    main()
