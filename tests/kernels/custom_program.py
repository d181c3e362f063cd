"""Run by test_custom_ops.py in a process of its own: prints JSON. How to build and use the custom ops in a graph.

No plugin is set: the custom ops need none.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from agent.kernels.library import library_path

ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": "O0"})
ms.set_device("CPU")

HEADS, KV_HEADS, DIM, BLOCKS, BLOCK_SIZE, POSITIONS = 4, 2, 16, 8, 4, 64
WIDTH = (HEADS + 2 * KV_HEADS) * DIM


def custom_op(name: str) -> ops.Custom:
    """An op of the library; shape and type of its output come from the library too, for any number of tokens."""
    op = ops.Custom(f"{library_path()}:{name}", out_shape=None, out_dtype=None, func_type="aot")
    op.add_prim_attr("reg_op_name", name)
    return op


class Attention(nn.Cell):
    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.rotary_cache = custom_op("RotaryCache")
        self.paged_attention = custom_op("PagedAttentionRagged")
        empty = np.zeros((BLOCKS, BLOCK_SIZE, KV_HEADS, DIM), np.float32)
        self.key_cache = Parameter(Tensor(empty).astype(dtype), name="key_cache")
        self.value_cache = Parameter(Tensor(empty).astype(dtype), name="value_cache")
        angles = np.arange(POSITIONS)[:, None] / 10000.0 ** (np.arange(0, DIM, 2) / DIM)
        angles = np.concatenate([angles, angles], 1).astype(np.float32)
        self.cos = Parameter(Tensor(np.cos(angles)), name="cos")
        self.sin = Parameter(Tensor(np.sin(angles)), name="sin")

    def construct(
        self, qkv: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, contexts: Tensor, queries: Tensor
    ) -> Tensor:
        query = self.rotary_cache(qkv, positions, self.cos, self.sin, self.key_cache, self.value_cache, slots)
        return self.paged_attention(query, self.key_cache, self.value_cache, tables, contexts, queries)


def ints(values: Any) -> Tensor:
    return Tensor(np.array(values, np.int32))


def rendering(qkv: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """One sequence from position 0, float64."""
    tokens = len(qkv)
    heads = qkv.astype(np.float64).reshape(tokens, -1, DIM)
    turned = np.concatenate([-heads[..., DIM // 2 :], heads[..., : DIM // 2]], -1)
    rotated = heads * cos[:tokens, None] + turned * sin[:tokens, None]
    q, k = rotated[:, :HEADS], np.repeat(rotated[:, HEADS : HEADS + KV_HEADS], HEADS // KV_HEADS, 1)
    v = np.repeat(heads[:, HEADS + KV_HEADS :], HEADS // KV_HEADS, 1)
    scores = np.einsum("thd,jhd->htj", q, k) / np.sqrt(DIM)
    scores = np.where(np.tril(np.ones((tokens, tokens))) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("htj,jhd->thd", weights / weights.sum(-1, keepdims=True), v).reshape(tokens, -1)


def check(name: str, dtype: Any) -> dict[str, bool]:
    net = Attention(dtype)
    any_ints = Tensor(shape=[None], dtype=ms.int32)
    net.set_inputs(
        Tensor(shape=[None, WIDTH], dtype=dtype), any_ints, any_ints,
        Tensor(shape=[None, None], dtype=ms.int32), any_ints, any_ints,
    )  # fmt: skip
    qkv = np.random.default_rng(0).standard_normal((7, WIDTH)).astype(np.float32)

    def run(begin: int, end: int, slots: list[int], table: list[int]) -> np.ndarray:
        part = Tensor(qkv[begin:end]).astype(dtype)
        out = net(part, ints(range(begin, end)), ints(slots), ints([table]), ints([end]), ints([end - begin]))
        assert out.dtype == dtype
        return out.astype(ms.float32).asnumpy()

    whole = run(0, 7, [8, 9, 10, 11, 4, 5, 6], [2, 1])
    parts = [run(0, 4, [12, 13, 14, 15], [3, 0, 7]), run(4, 6, [0, 1], [3, 0, 7]), run(6, 7, [2], [3, 0, 7])]
    exact = rendering(Tensor(qkv).astype(dtype).astype(ms.float32).asnumpy(), net.cos.asnumpy(), net.sin.asnumpy())
    limit = {ms.float32: 2e-6, ms.float16: 4e-3, ms.bfloat16: 3e-2}[dtype]
    cache = net.key_cache.astype(ms.float32).asnumpy().reshape(-1, KV_HEADS * DIM)
    results = {
        "equals float64": bool(np.abs(whole - exact).max() < limit),
        "whole equals parts": np.array_equal(whole, np.concatenate(parts)),
        "same keys in both places": np.array_equal(cache[[8, 9, 10, 11, 4, 5, 6]], cache[[12, 13, 14, 15, 0, 1, 2]]),
        "other slots untouched": bool((cache[16:] == 0).all() and (cache[[3, 7]] == 0).all()),
    }
    run(0, 2, [-1, -1], [2, 1])
    after = net.key_cache.astype(ms.float32).asnumpy().reshape(cache.shape)
    results["slot -1 writes nothing"] = np.array_equal(cache, after)
    return {f"{name}: {label}": passed for label, passed in results.items()}


def check_refusals() -> dict[str, bool]:
    """Each in a graph of its own: a graph that failed once reports that failure for ever."""
    cases = {
        "slot": ([0], [32], [[0]], [1]),
        "position": ([POSITIONS], [0], [[0]], [1]),
        "block": ([0], [0], [[8]], [1]),
        "context": ([0], [0], [[0]], [5]),
    }
    results = {}
    for label, arguments in cases.items():
        qkv = Tensor(np.ones((1, WIDTH), np.float32))
        try:
            Attention(ms.float32)(qkv, *map(ints, arguments), ints([1])).asnumpy()
            results[f"refuses a bad {label}"] = False
        except RuntimeError:
            results[f"refuses a bad {label}"] = True
    return results


def main() -> None:
    results: dict[str, bool] = {}
    for name, dtype in {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}.items():
        results |= check(name, dtype)
    results |= check_refusals()
    sys.stdout.write("\n" + json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
