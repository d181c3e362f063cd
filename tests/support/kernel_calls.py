"""Computes reference results of the kernels in float64 with NumPy, and makes random tensors and caches as inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from performance.kernels.calls import Array, store

EPSILON = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of one rounding."""


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    return store(rng.standard_normal(shape).astype(np.float32), dtype)


def attention_rendering(
    query: Array, keys: Array, values: Array, query_lens: list[int], context_lens: list[int], window: int = 10**9
) -> npt.NDArray[np.float64]:
    """Returns attention [query rows, heads, dim], computed in float64.

    Keys and values are contiguous: [sum of context_lens, kv_heads, dim]. Each query row sees the keys before it, and at
    most the last ``window`` of them.
    """
    out = np.zeros(query.shape)
    group = query.shape[1] // keys.shape[1]
    row = start = 0
    for query_len, context_len in zip(query_lens, context_lens, strict=True):
        k = np.repeat(keys[start : start + context_len], group, 1)
        v = np.repeat(values[start : start + context_len], group, 1)
        for i in range(query_len):
            visible = context_len - query_len + i + 1
            seen = slice(max(0, visible - window), visible)
            scores = np.einsum("hd,jhd->hj", query[row + i], k[seen]) / np.sqrt(query.shape[2])
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[row + i] = np.einsum("hj,jhd->hd", weights / weights.sum(1, keepdims=True), v[seen])
        row, start = row + query_len, start + context_len
    return out


@dataclass
class PagedKeys:
    """Keys and values of some sequences in the blocks of a cache. Unused slots contain NaN."""

    keys: Array
    values: Array
    block_tables: npt.NDArray[np.int32]


def page(
    rng: np.random.Generator, keys: Array, values: Array, context_lens: list[int], block_size: int, dtype: str
) -> PagedKeys:
    """Writes keys and values to cache blocks in random order. Returns the caches and block tables.

    Keys and values are contiguous: [sum of context_lens, kv_heads, dim].
    """
    counts = [-(-n // block_size) for n in context_lens]
    num_blocks = sum(counts) + 2
    shape = (num_blocks, block_size, *keys.shape[1:])
    caches = [store(np.full(shape, np.nan, np.float32), dtype) for _ in range(2)]
    order = rng.permutation(num_blocks).astype(np.int32)
    tables = np.zeros((len(context_lens), max([1, *counts])), np.int32)
    used = start = 0
    for seq, (length, count) in enumerate(zip(context_lens, counts, strict=True)):
        tables[seq, :count] = order[used : used + count]
        for j in range(length):
            block, offset = tables[seq, j // block_size], j % block_size
            caches[0][block, offset], caches[1][block, offset] = keys[start + j], values[start + j]
        used, start = used + count, start + length
    return PagedKeys(caches[0], caches[1], tables)
