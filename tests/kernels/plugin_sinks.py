"""Compares the native primitives of gpt-oss with NumPy versions of their documentation, on random shapes.

The primitives are FusedInferAttentionScore, Sigmoid, and GroupedMatmulV4 with biases. test_plugin_semantics.py runs
this file under pytest in its own process, which has the op plugin.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Tensor, nn
from mindspore.ops.auto_generate import Sigmoid
from plugin_semantics import (
    DTYPES,
    EPSILON,
    any_dtype,
    any_geometry,
    assert_rounded,
    dynamic,
    exact,
    examples,
    ints,
    seeds,
    values,
)

from agent.backends.base import AttentionForm
from agent.backends.native.experts import _FloatProducts, _WeightOnlyProducts
from agent.backends.native.sinks import ClampedSwiglu, SinkAttention, WindowFlags
from agent.kernels.library import hold_failures, take_failure

POSITIONS = 128


class Attend(nn.Cell):
    """The attention of ``SinkAttention`` over caches that are already written. A window of 0 means no window."""

    def __init__(self, geometry: tuple[int, int, int], block_size: int, window: int, dtype: str) -> None:
        super().__init__()
        form = AttentionForm(*geometry, window=window, sinks=True, block_size=block_size)
        self.attention = SinkAttention(form, dtype)
        self.flags = WindowFlags(POSITIONS, window) if window else None

    def construct(self, query: Any, keys: Any, cached: Any, tables: Any, lengths: Any, sinks: Any) -> Any:
        mask = None if self.flags is None else self.flags(lengths - 1)
        attended, sums = self.attention.attend(
            query, (keys,), (cached,), None, mask, None, lengths, None, None, None, None, None, None, None, tables
        )
        return self.attention._with_sinks(attended, sums, sinks), sums


@cache
def attend_graph(geometry: tuple[int, int, int], block_size: int, window: int, dtype: str) -> nn.Cell:
    graph = Attend(geometry, block_size, window, dtype)
    rows, table = dynamic(None, None, None, dtype=DTYPES[dtype]), dynamic(None, None, dtype=ms.int32)
    graph.set_inputs(rows, rows, rows, table, dynamic(None, dtype=ms.int32), dynamic(None, dtype=ms.float32))
    return graph


@examples
@given(
    any_dtype, seeds, any_geometry, st.sampled_from([16, 32]), st.sampled_from([0, 1, 20]),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 70)), min_size=1, max_size=3),
)  # fmt: skip
def test_attention_with_sinks(
    dtype: str, seed: int, geometry: tuple[int, int, int], block_size: int, window: int, steps: list[tuple[int, int]]
) -> None:
    """Each query has a row of the table. The last queries of a sequence have the same blocks and different lengths."""
    heads, kv_heads, dim = geometry
    rng, group = np.random.default_rng(seed), heads // kv_heads
    lengths = [earlier + index + 1 for queries, earlier in steps for index in range(queries)]
    owners = [row for row, (queries, _) in enumerate(steps) for _ in range(queries)]
    counts = [-(-(queries + earlier) // block_size) for queries, earlier in steps]
    tables = np.zeros((len(steps), max(counts) + 1), np.int32)
    order = rng.permutation(sum(counts)) + 1
    for row, count in enumerate(counts):
        tables[row, :count], order = order[:count], order[count:]
    tables = tables[owners]
    q, qx = values(rng, len(lengths), 1, heads * dim, dtype=dtype)
    (keys, kx), (cached, vx) = (values(rng, sum(counts) + 2, block_size, kv_heads * dim, dtype=dtype) for _ in range(2))
    sinks = (3 * rng.standard_normal(heads)).astype(np.float32)
    graph = attend_graph(geometry, block_size, window, dtype)
    out, sums = graph(q, keys, cached, ints(tables), ints(lengths), Tensor(sinks))
    wanted, logs = np.zeros((len(lengths), heads, dim)), np.zeros((len(lengths), heads, 1, 1))
    for row, length in enumerate(lengths):
        seen = np.arange(max(0, length - window) if window else 0, length)
        slots = tables[row, seen // block_size] * block_size + seen % block_size
        k, v = (np.repeat(each.reshape(-1, kv_heads, dim)[slots], group, 1) for each in (kx, vx))
        scores = np.einsum("hd,jhd->hj", qx[row].reshape(heads, dim), k) / np.sqrt(dim)
        total = np.exp(scores).sum(1) + np.exp(sinks.astype(np.float64))
        wanted[row] = np.einsum("hj,jhd->hd", np.exp(scores), v) / total[:, None]
        logs[row, :, 0, 0] = np.log(np.exp(scores).sum(1))
    np.testing.assert_allclose(sums.asnumpy(), logs, rtol=0, atol=2 * EPSILON[dtype] * np.abs(logs).max() + 1e-5)
    assert_rounded(out, wanted.reshape(len(lengths), -1), dtype, slack=3 * EPSILON[dtype])


class Given(nn.Cell):
    """Returns a given mask instead of the mask of a window."""

    def __init__(self, mask: np.ndarray[Any, Any], dtype: ms.dtype) -> None:
        super().__init__()
        self.mask = Tensor(mask, dtype)

    def construct(self, positions: Any) -> Any:
        return self.mask


@pytest.mark.parametrize(
    ("mask", "dtype", "problem"),
    [
        (np.arange(POSITIONS)[None] % 2 == 0, ms.bool_, "it must leave one run of keys"),
        (np.ones((1, 31)), ms.bool_, "attn_mask is bool with 2 axes and 31 elements; it must be bool [1, 32 or more]"),
        (np.ones((2, POSITIONS)), ms.bool_, "it must be bool [1, 32 or more]"),
        (np.ones((1, POSITIONS)), ms.float16, "it must be bool [1, 32 or more]"),
        (np.ones((1, 1, POSITIONS)), ms.bool_, "attn_mask is bool with 3 axes"),
    ],
    ids=["holes", "narrow", "rows", "float16", "axes"],
)
def test_a_mask_that_cannot_be_applied_is_refused(
    capfd: pytest.CaptureFixture[str], mask: np.ndarray[Any, Any], dtype: ms.dtype, problem: str
) -> None:
    graph = Attend((4, 2, 32), 16, 20, "float16")
    graph.flags = Given(mask, dtype)
    rng = np.random.default_rng(3)
    q, (keys, cached) = values(rng, 1, 1, 128, dtype="float16")[0], (
        values(rng, 3, 16, 64, dtype="float16")[0] for _ in range(2)
    )
    hold_failures(True)
    try:
        graph(q, keys, cached, ints([[1, 2]]), ints([20]), Tensor(np.zeros(4, np.float32)))
        assert take_failure() == "FusedInferAttentionScore"
    finally:
        take_failure()
        hold_failures(False)
    assert problem in capfd.readouterr().err


class Sigmoids(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.primitive = Sigmoid()

    def construct(self, x: Any) -> Any:
        return self.primitive(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sigmoid(dtype: str) -> None:
    x = Tensor(np.concatenate([np.linspace(-100, 100, 1001), [-np.inf, np.inf]]).astype(np.float32))
    x = x if dtype == "float32" else x.astype(DTYPES[dtype])
    with np.errstate(over="ignore"):
        wanted = 1 / (1 + np.exp(-exact(x)))
    found = exact(Sigmoids()(x))
    assert (np.abs(found - wanted) <= (2e-6 + EPSILON[dtype]) * wanted + 1e-37).all()


@examples
@given(any_dtype, seeds, st.integers(1, 5), st.integers(1, 40))
def test_clamped_swiglu(dtype: str, seed: int, rows: int, half: int) -> None:
    rng = np.random.default_rng(seed)
    both = Tensor((5 * rng.standard_normal((rows, 2 * half))).astype(np.float32)).astype(DTYPES[dtype])
    gate, up = np.split(exact(both), 2, axis=1)
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    assert_rounded(clamped_graph(dtype)(both), gate / (1 + np.exp(-1.702 * gate)) * (up + 1), dtype, slack=1e-5)


@cache
def clamped_graph(dtype: str) -> nn.Cell:
    graph = ClampedSwiglu(dtype)
    graph.set_inputs(dynamic(None, None, dtype=DTYPES[dtype]))
    return graph


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("quantised", [False, True])
def test_grouped_products_with_biases(dtype: str, quantised: bool) -> None:
    """The bias of a group is added before the sum is rounded. A large group has more rows than fit in one piece."""
    rng, counts = np.random.default_rng(11), [3, 0, 300]
    x, xx = values(rng, sum(counts), 32, dtype=dtype)
    bias, bx = Tensor(rng.standard_normal((3, 48)).astype(np.float32)), None
    bias = bias if dtype == "bfloat16" else bias.astype(ms.float16)
    bx = exact(bias)
    if quantised:
        integers = rng.integers(-127, 128, (3, 32, 48)).astype(np.int8)
        scale, sx = values(rng, 3, 48, dtype=dtype)
        weight: Any = (Tensor(integers), scale, Tensor(np.zeros((3, 48), np.float32)).astype(DTYPES[dtype]))
        wx, cell = integers * sx[:, None], _WeightOnlyProducts()
    else:
        (weight, wx), cell = values(rng, 3, 32, 48, dtype=dtype), _FloatProducts()
    out = cell(x, weight, ints(counts, np.int64), bias)
    ends = np.cumsum(counts)
    wanted = np.concatenate(
        [xx[end - count : end] @ wx[i] + bx[i] for i, (count, end) in enumerate(zip(counts, ends, strict=True))]
    )
    assert_rounded(out, wanted, dtype, slack=1e-6)
