"""Tests the attention of the native primitives.

Results are compared with float64. A row has equal bits for paged and contiguous keys, for chunks and whole prompts, and
alone and in a batch.
"""

from __future__ import annotations

import numpy as np
import pytest

from performance.kernels.calls import DTYPES, Array, attention, load
from support.kernel_calls import PagedKeys, attention_rendering, page, random_tensor
from support.kernel_threads import check_threads_change_no_bit

TOLERANCE = {"float32": 3e-6, "float16": 1.5e-3, "bfloat16": 1.2e-2}
"""Maximum absolute error, for values of standard deviation 1."""

CASES = [
    # each case: heads, kv_heads, dim, block_size, query length and context length of each sequence
    (1, 1, 2, 1, [1], [1]),
    (1, 1, 16, 16, [3], [3]),
    (4, 2, 16, 4, [5, 0, 2], [5, 0, 9]),
    (4, 4, 64, 16, [1, 1, 1], [1, 64, 65]),
    (8, 2, 32, 7, [70, 1], [70, 130]),
    (6, 2, 38, 128, [33, 4], [200, 4]),
    (8, 1, 128, 3, [1, 66], [191, 67]),
    (14, 2, 80, 16, [1, 9], [129, 140]),
    (2, 2, 256, 64, [2], [300]),
    (2, 1, 16, 16, [1], [32768]),
]


class Case:
    """Random tensors of one case, with contiguous and with paged keys."""

    def __init__(self, case: tuple[int, int, int, int, list[int], list[int]], dtype: str) -> None:
        heads, kv_heads, dim, block_size, self.query_lens, self.context_lens = case
        rng = np.random.default_rng(11)
        self.dtype = dtype
        self.query = random_tensor(rng, (sum(self.query_lens), heads, dim), dtype)
        self.keys = random_tensor(rng, (sum(self.context_lens), kv_heads, dim), dtype)
        self.values = random_tensor(rng, (sum(self.context_lens), kv_heads, dim), dtype)
        self.paged: PagedKeys = page(rng, self.keys, self.values, self.context_lens, block_size, dtype)

    def run_paged(self, *, reference: bool = False) -> Array:
        code, out = attention(
            self.query, self.paged.keys, self.paged.values, self.query_lens, self.context_lens, self.dtype,
            block_tables=self.paged.block_tables, reference=reference,
        )  # fmt: skip
        assert code == 0
        return out

    def run_plain(self) -> Array:
        code, out = attention(self.query, self.keys, self.values, self.query_lens, self.context_lens, self.dtype)
        assert code == 0
        return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_equals_float64(dtype: str, case: tuple[int, int, int, int, list[int], list[int]]) -> None:
    made = Case(case, dtype)
    exact = attention_rendering(
        load(made.query, dtype), load(made.keys, dtype), load(made.values, dtype), made.query_lens, made.context_lens
    )
    for out in (made.run_paged(), made.run_paged(reference=True)):
        np.testing.assert_allclose(load(out, dtype), exact, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_paged_and_plain_agree_bit_for_bit(dtype: str, case: tuple[int, int, int, int, list[int], list[int]]) -> None:
    made = Case(case, dtype)
    np.testing.assert_array_equal(made.run_paged(), made.run_plain())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 2, 5, 16, 63, 64, 65, 127, 128])
def test_block_size_changes_no_bit(dtype: str, block_size: int) -> None:
    made = Case((4, 2, 24, block_size, [3], [133]), dtype)
    np.testing.assert_array_equal(made.run_paged(), made.run_plain())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 48), (8, 2, 64), (7, 1, 20), (9, 3, 128), (64, 1, 32)])
def test_prefill_chunks_and_decode_agree_bit_for_bit(dtype: str, heads: int, kv_heads: int, dim: int) -> None:
    length = 150
    made = Case((heads, kv_heads, dim, 16, [length], [length]), dtype)
    whole = made.run_paged()
    for step in (1, 7, 64, 100):
        for begin in range(0, length, step) if step > 1 else (0, 1, 15, 63, 64, 65, 127, 128, 149):
            end = min(begin + step, length)
            code, out = attention(
                made.query[begin:end].copy(), made.paged.keys, made.paged.values, [end - begin], [end], dtype,
                block_tables=made.paged.block_tables,
            )  # fmt: skip
            assert code == 0
            np.testing.assert_array_equal(out, whole[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_does_not_depend_on_the_batch(dtype: str) -> None:
    query_lens, context_lens = [1, 5, 0, 1, 40, 1], [90, 5, 0, 1, 105, 64]
    made = Case((4, 2, 32, 8, query_lens, context_lens), dtype)
    whole = made.run_paged()
    row = 0
    for seq, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        code, alone = attention(
            made.query[row : row + query_len].copy(), made.paged.keys, made.paged.values, [query_len], [context_len],
            dtype, block_tables=made.paged.block_tables[seq : seq + 1].copy(),
        )  # fmt: skip
        assert code == 0
        np.testing.assert_array_equal(alone, whole[row : row + query_len])
        row += query_len


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype: str) -> None:
    made = Case((8, 4, 32, 16, [100, 1, 1], [100, 300, 129]), dtype)
    check_threads_change_no_bit(lambda: [made.run_paged()], (1, 2, 3))


def test_large_scores_neither_overflow_nor_lose_the_best_key() -> None:
    rng = np.random.default_rng(3)
    made = Case((2, 2, 32, 16, [1], [200]), "float32")
    made.query *= 50
    made.keys *= 50
    exact = attention_rendering(made.query, made.keys, made.values, [1], [200])
    np.testing.assert_allclose(made.run_plain(), exact, rtol=0, atol=2e-3)
    made.keys[rng.integers(200)] = 0
    assert np.isfinite(made.run_plain()).all()


def test_rows_past_the_last_sequence_become_zero() -> None:
    made = Case((2, 1, 16, 4, [3], [3]), "float32")
    query = np.concatenate([made.query, made.query])
    code, out = attention(query, made.keys, made.values, [3], [3], "float32")
    assert code == 0
    np.testing.assert_array_equal(out[:3], made.run_plain())
    assert (out[3:] == 0).all()


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "message"),
    [
        ([3], [2], "sequence 0 has 3 queries and 2 keys"),
        ([-1], [2], "sequence 0 has -1 queries and 2 keys"),
        ([4], [4], "the query lengths sum to 4; the step has 3 tokens"),
        ([3], [9], "context_lens[0] is 9; block_tables of width 2 and block_size 4 hold 8"),
    ],
)
def test_bad_lengths_are_refused(
    query_lens: list[int], context_lens: list[int], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    made = Case((2, 1, 16, 4, [3], [8]), "float32")
    code, out = attention(
        made.query, made.paged.keys, made.paged.values, query_lens, context_lens, "float32",
        block_tables=made.paged.block_tables,
    )  # fmt: skip
    assert code == 1
    assert (out == 77).all()
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("block", [-1, 4])
def test_a_block_outside_the_cache_is_refused(block: int, capfd: pytest.CaptureFixture[str]) -> None:
    made = Case((2, 1, 16, 4, [3], [8]), "float32")
    made.paged.block_tables[0, 1] = block
    code, _ = attention(
        made.query, made.paged.keys, made.paged.values, [3], [8], "float32", block_tables=made.paged.block_tables
    )
    assert code == 2
    assert f"block_tables[1] is {block}; it must be from 0 to 3" in capfd.readouterr().err
