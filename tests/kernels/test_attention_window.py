"""Tests the attention of the native primitives with a sliding window.

Results are compared with float64. Chunks give the same bits as whole prompts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from performance.kernels.calls import DTYPES, Array, attention, load
from support.kernel_calls import PagedKeys, attention_rendering, page, random_tensor

TOLERANCE = {"float32": 3e-6, "float16": 1.5e-3, "bfloat16": 1.2e-2}
CASES = [
    # each case: heads, kv_heads, dim, block_size, query length and context length of each sequence
    (4, 2, 16, 4, [5, 0, 2], [5, 0, 9]),
    (8, 2, 32, 7, [70, 1], [70, 130]),
    (8, 1, 64, 3, [1, 66], [191, 67]),
    (3, 3, 20, 16, [130], [200]),
]


def first_keys(query_lens: list[int], context_lens: list[int], window: int) -> npt.NDArray[np.int64]:
    ends = [
        np.arange(context - queries + 1, context + 1) for queries, context in zip(query_lens, context_lens, strict=True)
    ]
    return np.maximum(0, np.concatenate(ends) - window).astype(np.int64)


class Case:
    def __init__(self, case: tuple[int, int, int, int, list[int], list[int]], dtype: str, window: int) -> None:
        heads, kv_heads, dim, block_size, self.query_lens, self.context_lens = case
        rng = np.random.default_rng(12)
        self.dtype, self.window = dtype, window
        self.query = random_tensor(rng, (sum(self.query_lens), heads, dim), dtype)
        self.keys = random_tensor(rng, (sum(self.context_lens), kv_heads, dim), dtype)
        self.values = random_tensor(rng, (sum(self.context_lens), kv_heads, dim), dtype)
        self.paged: PagedKeys = page(rng, self.keys, self.values, self.context_lens, block_size, dtype)

    def run(self, *, paged: bool, reference: bool = False) -> Array:
        starts = first_keys(self.query_lens, self.context_lens, self.window)
        keys, values = (self.paged.keys, self.paged.values) if paged else (self.keys, self.values)
        code, out = attention(
            self.query, keys, values, self.query_lens, self.context_lens, self.dtype, first_keys=starts,
            block_tables=self.paged.block_tables if paged else None, reference=reference,
        )  # fmt: skip
        assert code == 0
        return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 6, 64, 65, 100])
@pytest.mark.parametrize("case", CASES)
def test_equals_float64(dtype: str, window: int, case: tuple[int, int, int, int, list[int], list[int]]) -> None:
    made = Case(case, dtype, window)
    exact = attention_rendering(
        load(made.query, dtype), load(made.keys, dtype), load(made.values, dtype), made.query_lens, made.context_lens,
        window,
    )  # fmt: skip
    np.testing.assert_allclose(load(made.run(paged=True), dtype), exact, rtol=0, atol=TOLERANCE[dtype])
    np.testing.assert_allclose(load(made.run(paged=True, reference=True), dtype), exact, rtol=0, atol=TOLERANCE[dtype])
    np.testing.assert_array_equal(made.run(paged=True), made.run(paged=False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [6, 64, 100, 1000])
def test_chunks_and_decode_agree_bit_for_bit(dtype: str, window: int) -> None:
    length = 210
    whole = Case((6, 2, 32, 16, [length], [length]), dtype, window)
    out = whole.run(paged=True)
    for begin, end in ((0, 1), (1, 90), (90, 154), (154, 155), (155, 156), (156, length)):
        code, piece = attention(
            whole.query[begin:end].copy(), whole.paged.keys, whole.paged.values, [end - begin], [end], dtype,
            block_tables=whole.paged.block_tables, first_keys=first_keys([end - begin], [end], window),
        )  # fmt: skip
        assert code == 0
        np.testing.assert_array_equal(piece, out[begin:end])
    if window == 1000:
        code, plain = attention(
            whole.query, whole.paged.keys, whole.paged.values, [length], [length], dtype,
            block_tables=whole.paged.block_tables,
        )  # fmt: skip
        assert code == 0
        np.testing.assert_array_equal(plain, out)
