"""Compares each native primitive with a NumPy version of its documentation, on random shapes.

docs/ascend.md lists the pages of that documentation. Graphs have dynamic shapes, as in the models.
test_plugin_semantics.py runs this file under pytest in its own process, which has the op plugin.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import Any

from agent.kernels.library import hold_failures, library_path, load_library, take_failure

os.environ["MS_OP_PLUGIN_PATH"] = str(library_path())

import mindspore as ms
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.ops import auto_generate

from agent.backends.cpu.native import NativeCpuOps
from agent.group.model_part import ModelPart
from agent.kernels.laid_out_caches import LaidOutCaches
from llm_serving.config import ParallelConfig
from llm_serving.model.parallel import place, shard_of
from support.kernel_calls import EPSILON, attention_rendering
from support.some_machine import SHAPE

ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": "O0"})
ms.set_device("CPU")

DTYPES = {"float16": ms.float16, "bfloat16": ms.bfloat16}
GEOMETRIES = [(4, 4, 16), (4, 2, 32), (8, 1, 64), (6, 3, 48)]
"""Query heads, key-value heads and size of a head.

Key-value heads have one query head, two query heads, all query heads, or an odd number of them.
"""
MAX_PROMPTS = 4
CACHE_SLOTS = 48
any_dtype = st.sampled_from(sorted(DTYPES))
any_geometry = st.sampled_from(GEOMETRIES)
seeds = st.integers(0, 2**32 - 1)
examples = settings(
    max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


class Apply(nn.Cell):
    """Calls a primitive with its inputs, followed by the constants given at creation."""

    def __init__(self, primitive: Any, *constants: Any) -> None:
        super().__init__()
        self.primitive, self.constants = primitive, constants

    def construct(self, *inputs: Any) -> Any:
        return self.primitive(*inputs, *self.constants)


class Flash(nn.Cell):
    def __init__(self, heads: int, dim: int, dtype: str) -> None:
        super().__init__()
        self.primitive = auto_generate.FlashAttentionScore(heads, input_layout="TH", scale_value=dim**-0.5)
        masked = 1.0 if dtype == "bfloat16" else -10000.0
        self.mask = Tensor(np.triu(np.ones((128, 128)), 1) * masked, DTYPES[dtype])

    def construct(self, query: Any, key: Any, value: Any, lengths: Any) -> Any:
        return self.primitive(query, key, value, None, None, None, self.mask, None, lengths, lengths)


class Paged(nn.Cell):
    def __init__(self, heads: int, kv_heads: int, dim: int) -> None:
        super().__init__()
        self.primitive = auto_generate.PagedAttention(heads, dim**-0.5, kv_heads)

    def construct(self, query: Any, keys: Any, values: Any, tables: Any, lens: Any, mask: Any, q_lens: Any) -> Any:
        return self.primitive(query, keys, values, tables, lens, None, None, mask, q_lens)


class Write(nn.Cell):
    """Writes keys and values to the caches, which are parameters of this Cell, as in the models."""

    def __init__(self, kv_heads: int, dim: int, block_size: int, dtype: str, slots: int = CACHE_SLOTS) -> None:
        super().__init__()
        shape = (slots // block_size, block_size, kv_heads, dim)
        self.primitive = auto_generate.ReshapeAndCache()
        self.keys, self.values = (Parameter(Tensor(np.zeros(shape), DTYPES[dtype]), name=n) for n in ("keys", "values"))

    def construct(self, key: Any, value: Any, slots: Any) -> Any:
        return self.primitive(key, value, self.keys, self.values, slots)


class WriteThenAttend(nn.Cell):
    """Writes keys and values to the caches of ``write``, and attends to them."""

    def __init__(self, write: Write, paged: Paged) -> None:
        super().__init__()
        self.write, self.paged = write, paged

    def construct(
        self, key: Any, value: Any, slots: Any, query: Any, tables: Any, lens: Any, mask: Any, q_lens: Any
    ) -> Any:
        query = ops.depend(query, self.write(key, value, slots))
        return self.paged(query, self.write.keys, self.write.values, tables, lens, mask, q_lens)


def dynamic(*shape: int | None, dtype: Any) -> Tensor:
    return Tensor(shape=shape, dtype=dtype)


def values(rng: np.random.Generator, *shape: int, dtype: str) -> tuple[Tensor, np.ndarray]:
    """Returns random numbers as an input of the primitive, and their exact values in NumPy."""
    tensor = Tensor(rng.standard_normal(shape).astype(np.float32)).astype(DTYPES[dtype])
    return tensor, exact(tensor)


def exact(tensor: Tensor) -> np.ndarray:
    return tensor.astype(ms.float32).asnumpy().astype(np.float64)


def ints(numbers: Any, dtype: Any = np.int32) -> Tensor:
    return Tensor(np.array(numbers, dtype))


def assert_rounded(tensor: Tensor, wanted: np.ndarray, dtype: str, *, slack: float) -> None:
    """Checks that ``tensor`` is the exact result ``wanted`` rounded once.

    In addition, each element may differ by ``slack`` times the largest value.
    """
    limit = EPSILON[dtype] * np.abs(wanted) + slack * (np.abs(wanted).max(initial=0) + 1e-6)
    assert tuple(tensor.shape) == wanted.shape
    assert (np.abs(exact(tensor) - wanted) <= limit).all(), np.abs(exact(tensor) - wanted).max()


@cache
def norm_graphs(dtype: str) -> tuple[nn.Cell, nn.Cell]:
    rows, gamma = dynamic(None, None, dtype=DTYPES[dtype]), dynamic(None, dtype=DTYPES[dtype])
    norm, add_norm = Apply(auto_generate.RmsNorm(1e-5)), Apply(auto_generate.AddRmsNorm(), 1e-5)
    norm.set_inputs(rows, gamma)
    add_norm.set_inputs(rows, rows, gamma)
    return norm, add_norm


@examples
@given(any_dtype, seeds, st.integers(1, 9), st.integers(1, 200))
def test_rms_norm(dtype: str, seed: int, rows: int, width: int) -> None:
    """The results are y = x / sqrt(mean(x^2) + epsilon) * gamma, and the reciprocal of the square root [rows, 1] in
    float32.
    """
    rng = np.random.default_rng(seed)
    (x, x_exact), (gamma, gamma_exact) = values(rng, rows, width, dtype=dtype), values(rng, width, dtype=dtype)
    y, rstd = norm_graphs(dtype)[0](x, gamma)
    scale = 1 / np.sqrt((x_exact**2).mean(-1, keepdims=True) + 1e-5)
    assert_rounded(y, x_exact * scale * gamma_exact, dtype, slack=1e-6)
    assert rstd.dtype == ms.float32
    np.testing.assert_allclose(rstd.asnumpy(), scale, rtol=1e-5)


@examples
@given(any_dtype, seeds, st.integers(1, 9), st.integers(1, 200))
def test_add_rms_norm(dtype: str, seed: int, rows: int, width: int) -> None:
    """The results are the norm y of the sum x1 + x2, the reciprocal of its square root, and the sum.

    The norm is computed from the rounded sum.
    """
    rng = np.random.default_rng(seed)
    (a, a_exact), (b, b_exact) = (values(rng, rows, width, dtype=dtype) for _ in range(2))
    gamma, gamma_exact = values(rng, width, dtype=dtype)
    y, _, total = norm_graphs(dtype)[1](a, b, gamma)
    rounded = Tensor((a_exact + b_exact).astype(np.float32)).astype(DTYPES[dtype])
    np.testing.assert_array_equal(exact(total), exact(rounded))
    stored = exact(total)
    wanted = stored / np.sqrt((stored**2).mean(-1, keepdims=True) + 1e-5) * gamma_exact
    assert_rounded(y, wanted, dtype, slack=1e-6)


@cache
def swiglu_graph(dtype: str) -> nn.Cell:
    graph = Apply(auto_generate.Swiglu(), -1)
    graph.set_inputs(dynamic(None, None, dtype=DTYPES[dtype]))
    return graph


@examples
@given(any_dtype, seeds, st.integers(1, 9), st.integers(1, 150))
def test_swiglu(dtype: str, seed: int, rows: int, half: int) -> None:
    """The result is silu(first half) * second half."""
    x, x_exact = values(np.random.default_rng(seed), rows, 2 * half, dtype=dtype)
    gate, value = np.split(x_exact, 2, -1)
    assert_rounded(swiglu_graph(dtype)(x), gate / (1 + np.exp(-gate)) * value, dtype, slack=1e-6)


class MindFormersExtras(nn.Cell):
    """Two operators with MindFormers' arguments: SiLU, and the copy of sequence lengths to the host."""

    def construct(self, x: Any, lengths: Any) -> Any:
        return mint.nn.functional.silu(x), ops.move_to(lengths, "CPU")


@cache
def extras_graph(dtype: str) -> nn.Cell:
    graph = MindFormersExtras()
    graph.set_inputs(dynamic(None, None, dtype=DTYPES[dtype]), dynamic(None, dtype=ms.int32))
    return graph


@examples
@given(any_dtype, seeds, st.integers(1, 9), st.integers(1, 150))
def test_silu_and_move_to(dtype: str, seed: int, rows: int, width: int) -> None:
    """SiLU is x / (1 + exp(-x)). The copied integers are unchanged."""
    rng = np.random.default_rng(seed)
    x, x_exact = values(rng, rows, width, dtype=dtype)
    lengths = rng.integers(0, 2**31 - 1, rows, np.int32)
    activated, moved = extras_graph(dtype)(x, Tensor(lengths))
    assert_rounded(activated, x_exact / (1 + np.exp(-x_exact)), dtype, slack=1e-6)
    np.testing.assert_array_equal(moved.asnumpy(), lengths)


@cache
def gelu_graph(dtype: str) -> nn.Cell:
    graph = Apply(auto_generate.GeluExt(), "tanh")
    graph.set_inputs(dynamic(None, None, dtype=DTYPES[dtype]))
    return graph


@examples
@given(any_dtype, seeds, st.integers(1, 9), st.integers(1, 600))
def test_gelu(dtype: str, seed: int, rows: int, width: int) -> None:
    """GELU in its form with tanh: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))."""
    x, exact = values(np.random.default_rng(seed), rows, width, dtype=dtype)
    wanted = exact / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3)))
    assert_rounded(gelu_graph(dtype)(x), wanted, dtype, slack=1e-6)


class MindFormersExperts(nn.Cell):
    """The primitives of MindFormers' expert router and dispatcher, with its arguments.

    The grouped products are left out.
    """

    def __init__(self, k: int, dtype: str) -> None:
        super().__init__()
        self.k, self.zero, self.first = k, Tensor(0, DTYPES[dtype]), Tensor([0], ms.int32)

    def construct(self, scores: Any, rows: Any, marks: Any, counts: Any) -> Any:
        best, experts = mint.topk(scores, k=self.k, dim=-1)
        kept = ops.masked_fill(rows, marks >= 3, self.zero)
        return best, experts, mint.nan_to_num(rows, 0, 0, 0), kept, mint.index_select(counts, 0, self.first)


@cache
def experts_graph(k: int, dtype: str) -> nn.Cell:
    graph = MindFormersExperts(k, dtype)
    rows, numbers = dynamic(None, None, dtype=DTYPES[dtype]), dynamic(None, None, dtype=ms.int32)
    graph.set_inputs(dynamic(None, None, dtype=ms.float32), rows, numbers, numbers)
    return graph


@examples
@given(any_dtype, seeds, st.integers(1, 9), st.integers(8, 130), st.sampled_from([1, 3, 8]))
def test_primitives_of_mindformers_experts(dtype: str, seed: int, rows: int, width: int, k: int) -> None:
    """Compares four primitives with NumPy.

    They are top-k, replacement of NaN and infinities by zeros, a mask that sets zeros, and one row of a table. If
    elements are equal, top-k takes the first of them.
    """
    rng = np.random.default_rng(seed)
    # Only nine different values, so that many scores are equal.
    scores = rng.integers(-4, 5, (rows, width)).astype(np.float32)
    _, exact_numbers = values(rng, rows, width, dtype=dtype)
    broken = exact_numbers.astype(np.float32)
    places = rng.random((3, rows, width)) < 0.1
    for marked, value in zip(places, (np.nan, np.inf, -np.inf), strict=True):
        broken[marked] = value
    marks, counts = rng.integers(0, 5, (rows, width), np.int32), rng.integers(0, 99, (2, width), np.int32)
    given = Tensor(scores), Tensor(broken).astype(DTYPES[dtype]), Tensor(marks), Tensor(counts)
    best, experts, finite, kept, picked = experts_graph(k, dtype)(*given)
    order = np.argsort(-scores, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(experts.asnumpy(), order)
    assert experts.dtype == ms.int64
    np.testing.assert_array_equal(best.asnumpy(), np.take_along_axis(scores, order, -1))
    np.testing.assert_array_equal(exact(finite), np.where(np.isfinite(broken), exact_numbers, 0))
    left = np.where(np.isfinite(broken), exact_numbers, broken)
    np.testing.assert_array_equal(exact(kept), np.where(marks >= 3, 0, left))
    np.testing.assert_array_equal(picked.asnumpy(), counts[:1])


class Routing(nn.Cell):
    """Computes the weights of the chosen experts with MindFormers' operators, most of which are MindSpore's own."""

    def construct(self, logits: Any) -> Any:
        shares, experts = mint.topk(mint.softmax(logits, dim=-1, dtype=ms.float32), k=4, dim=-1)
        return mint.div(shares, mint.add(mint.sum(shares, -1, True), 1e-20)), experts


@pytest.mark.parametrize("experts", [4, 5, 8, 60, 64, 128, 200])
def test_a_tokens_shares_do_not_depend_on_the_others(experts: int) -> None:
    """The weights of a token's experts have the same bits alone and among few or many tokens, and equal NumPy's values.
    """
    graph = Routing()
    graph.set_inputs(dynamic(None, None, dtype=ms.float32))
    logits = np.random.default_rng(experts).standard_normal((300, experts)).astype(np.float32) * 3
    shares, chosen = (each.asnumpy() for each in graph(Tensor(logits)))
    for rows in (slice(0, 1), slice(17, 18), slice(299, 300), slice(3, 5), slice(40, 73), slice(100, 229)):
        some, places = (each.asnumpy() for each in graph(Tensor(logits[rows])))
        np.testing.assert_array_equal(some.view(np.uint32), shares[rows].view(np.uint32))
        np.testing.assert_array_equal(places, chosen[rows])
    powers = np.take_along_axis(np.exp(logits.astype(np.float64)), chosen, 1)
    np.testing.assert_allclose(shares, powers / powers.sum(1, keepdims=True), rtol=2e-5)


class Extremes(nn.Cell):
    """Uses options that the models do not use: the smallest elements of a row, and columns of a table."""

    def construct(self, rows: Any, columns: Any) -> Any:
        smallest, places = mint.topk(rows, k=2, dim=1, largest=False)
        return smallest, places, mint.index_select(rows, 1, columns), mint.nan_to_num(rows, 1.5, 2.5, -3.5)


@pytest.mark.parametrize("dtype", ["float32", *DTYPES])
def test_smallest_nan_and_columns(dtype: str) -> None:
    """``topk`` treats NaN as larger than all numbers, so NaN comes last among the smallest elements.

    ``index_select`` takes columns of the table, and ``nan_to_num`` replaces NaN and infinities.
    """
    kind = {"float32": ms.float32, **DTYPES}[dtype]
    graph = Extremes()
    graph.set_inputs(dynamic(None, None, dtype=kind), dynamic(None, dtype=ms.int64))
    nan, infinity = np.nan, np.inf
    rows = np.array([[nan, 3, -infinity, 3, 2], [5, nan, nan, nan, nan], [1, infinity, 0, -0.0, 4]], np.float32)
    smallest, places, columns, finite = graph(Tensor(rows).astype(kind), ints([4, 0, 4], np.int64))
    np.testing.assert_array_equal(places.asnumpy(), [[2, 4], [0, 1], [2, 3]])
    np.testing.assert_array_equal(exact(smallest), [[-infinity, 2], [5, nan], [0, 0]])
    np.testing.assert_array_equal(exact(columns), rows[:, [4, 0, 4]])
    wanted = np.where(np.isnan(rows), 1.5, np.where(rows == infinity, 2.5, np.where(rows == -infinity, -3.5, rows)))
    np.testing.assert_array_equal(exact(finite), wanted)


@cache
def rotary_graph(dtype: str, cos_format: int) -> nn.Cell:
    graph = Apply(auto_generate.ApplyRotaryPosEmb(cos_format))
    rows = dynamic(None, None, dtype=DTYPES[dtype])
    graph.set_inputs(rows, rows, rows, rows, dynamic(None, dtype=ms.int32))
    return graph


@examples
@given(any_dtype, seeds, any_geometry, st.sampled_from([2, 3]), st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_rotary_with_a_row_of_cosines_a_token(
    dtype: str, seed: int, geometry: tuple[int, int, int], cos_format: int, lengths: list[int]
) -> None:
    """``cos`` and ``sin`` have the shape [tokens, dim].

    With ``cos_format`` 2, an element is rotated together with the element half a head away. With 3, it is rotated
    together with its neighbour.
    """
    heads, kv_heads, dim = geometry
    tokens, rng = sum(lengths) + 1, np.random.default_rng(seed)
    (q, q_exact), (k, k_exact) = (values(rng, tokens, n * dim, dtype=dtype) for n in (heads, kv_heads))
    (cos, cos_exact), (sin, sin_exact) = (values(rng, tokens, dim, dtype=dtype) for _ in range(2))
    turned = rotary_graph(dtype, cos_format)(q, k, cos, sin, ints([*lengths, 1]))
    for out, x in zip(turned, (q_exact, k_exact), strict=True):
        per_head = x.reshape(tokens, -1, dim)
        if cos_format == 2:
            other = np.concatenate([-per_head[..., dim // 2 :], per_head[..., : dim // 2]], -1)
        else:
            other = np.stack([-per_head[..., 1::2], per_head[..., ::2]], -1).reshape(per_head.shape)
        wanted = per_head * cos_exact[:, None] + other * sin_exact[:, None]
        assert_rounded(out, wanted.reshape(x.shape), dtype, slack=1e-6)


@cache
def write_graph(kv_heads: int, dim: int, block_size: int, dtype: str) -> Write:
    graph = Write(kv_heads, dim, block_size, dtype)
    rows = dynamic(None, None, dtype=DTYPES[dtype])
    graph.set_inputs(rows, rows, dynamic(None, dtype=ms.int32))
    return graph


@examples
@given(any_dtype, seeds, any_geometry, st.integers(1, 12), st.sampled_from([1, 3, 16]))
def test_reshape_and_cache(dtype: str, seed: int, geometry: tuple[int, int, int], tokens: int, block_size: int) -> None:
    """Each token is written to its slot, which is block * block_size + offset. A negative slot is padding.

    Each slot is used only once, and all other memory stays unchanged.
    """
    _, kv_heads, dim = geometry
    rng, graph = np.random.default_rng(seed), write_graph(kv_heads, dim, block_size, dtype)
    slots = rng.permutation(CACHE_SLOTS)[:tokens].astype(np.int32)
    slots[rng.random(tokens) < 0.3] = -1
    (k, k_exact), (v, v_exact) = (values(rng, tokens, kv_heads * dim, dtype=dtype) for _ in range(2))
    wanted = [exact(each).reshape(CACHE_SLOTS, -1) for each in (graph.keys, graph.values)]
    for cached, new in zip(wanted, (k_exact, v_exact), strict=True):
        cached[slots[slots >= 0]] = new[slots >= 0]
    graph(k, v, ints(slots)).asnumpy()
    for cached, after in zip(wanted, (graph.keys, graph.values), strict=True):
        np.testing.assert_array_equal(exact(after).reshape(CACHE_SLOTS, -1), cached)


@cache
def flash_graph(geometry: tuple[int, int, int], dtype: str) -> nn.Cell:
    graph = Flash(geometry[0], geometry[2], dtype)
    rows = dynamic(None, None, dtype=DTYPES[dtype])
    graph.set_inputs(rows, rows, rows, dynamic(MAX_PROMPTS, dtype=ms.int64))
    return graph


@examples
@given(any_dtype, seeds, any_geometry, st.lists(st.integers(0, 40), min_size=1, max_size=MAX_PROMPTS))
def test_flash_attention(dtype: str, seed: int, geometry: tuple[int, int, int], lengths: list[int]) -> None:
    """With the layout TH, the prompts of a step lie one after the other, and each prompt is causal.

    One input lists the length of each prompt. Its unused elements are 0.
    """
    heads, kv_heads, dim = geometry
    lengths = lengths if sum(lengths) else [1]
    tokens, rng = sum(lengths), np.random.default_rng(seed)
    (q, qx), (k, kx), (v, vx) = (values(rng, tokens, n * dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    padded = ints(lengths + [0] * (MAX_PROMPTS - len(lengths)), np.int64)
    out = flash_graph(geometry, dtype)(q, k, v, padded)[3]
    per_head = [x.reshape(tokens, -1, dim) for x in (qx, kx, vx)]
    wanted = attention_rendering(*per_head, lengths, lengths)
    assert_rounded(out, wanted.reshape(tokens, -1), dtype, slack=2 * EPSILON[dtype])


@cache
def paged_graph(geometry: tuple[int, int, int], dtype: str) -> nn.Cell:
    graph = Paged(*geometry)
    caches, vector = dynamic(None, None, None, None, dtype=DTYPES[dtype]), dynamic(None, dtype=ms.int32)
    rows, table = dynamic(None, None, dtype=DTYPES[dtype]), dynamic(None, None, dtype=ms.int32)
    graph.set_inputs(rows, caches, caches, table, vector, rows, vector)
    return graph


@examples
@given(
    any_dtype, seeds, any_geometry, st.sampled_from([16, 32]),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 70)), min_size=1, max_size=4), st.booleans(),
)  # fmt: skip
def test_paged_attention(
    dtype: str, seed: int, geometry: tuple[int, int, int], block_size: int, steps: list[tuple[int, int]], decode: bool
) -> None:
    """Computes the last ``q_seq_lens`` tokens of each sequence over its blocks, which are in random order.

    The steps are chunks, decodes and mixed steps. A mask [tokens, positions] hides later positions. Decode steps have
    no mask.
    """
    heads, kv_heads, dim = geometry
    queries = [1 if decode else query for query, _ in steps]
    contexts = [query + earlier for query, (_, earlier) in zip(queries, steps, strict=True)]
    tokens, rng = sum(queries), np.random.default_rng(seed)
    counts = [-(-length // block_size) for length in contexts]
    width = max(counts) + 1
    q, qx = values(rng, tokens, heads * dim, dtype=dtype)
    (keys, kx), (cached, vx) = (values(rng, sum(counts) + 2, block_size, kv_heads, dim, dtype=dtype) for _ in range(2))
    order = rng.permutation(sum(counts) + 1) + 1
    tables = np.zeros((len(steps), width), np.int32)
    for row, count in enumerate(counts):
        tables[row, :count], order = order[:count], order[count:]
    positions = np.concatenate([np.arange(c - n, c) for n, c in zip(queries, contexts, strict=True)])
    hidden = np.arange(width * block_size)[None] > positions[:, None]
    mask = np.zeros((1, 1)) if decode else np.where(hidden, -10000.0, 0.0)
    out = paged_graph(geometry, dtype)(
        q, keys, cached, ints(tables), ints(contexts), Tensor(mask, DTYPES[dtype]), ints(queries)
    )
    places = [(row, j) for row, length in enumerate(contexts) for j in range(length)]
    slots = [tables[row, j // block_size] * block_size + j % block_size for row, j in places]
    flat = [each.reshape(-1, kv_heads, dim)[slots] for each in (kx, vx)]
    wanted = attention_rendering(qx.reshape(tokens, heads, dim), *flat, queries, contexts)
    assert_rounded(out, wanted.reshape(tokens, -1), dtype, slack=2 * EPSILON[dtype])


def hiding(queries: list[int], contexts: list[int], window: int, positions: int) -> Tensor:
    """Returns a mask [tokens, positions] that hides later positions, and those before the window.

    If ``window`` is 0, returns the mask of steps without a mask.
    """
    if window == 0:
        return Tensor(np.zeros((1, 1)), ms.bfloat16)
    own = np.concatenate([np.arange(c - n, c) for n, c in zip(queries, contexts, strict=True)])[:, None]
    others = np.arange(positions)[None]
    return Tensor(np.where((others > own) | (others <= own - window), -10000.0, 0.0), ms.bfloat16)


def write_then_attend_graph(write: Write, geometry: tuple[int, int, int]) -> WriteThenAttend:
    graph = WriteThenAttend(write, Paged(*geometry))
    rows, vector = dynamic(None, None, dtype=ms.bfloat16), dynamic(None, dtype=ms.int32)
    graph.set_inputs(rows, rows, vector, rows, dynamic(None, None, dtype=ms.int32), vector, rows, vector)
    return graph


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("block_size", [16, 48])
def test_a_laid_out_cache_has_other_memory_and_gives_the_same_bits(
    geometry: tuple[int, int, int], block_size: int
) -> None:
    """Two sequences have 300 and 13 tokens, in blocks in random order.

    The first 160 tokens of the long sequence are written as whole groups, all other tokens one by one. The steps are
    decodes, chunks, and a chunk that is long enough for the plain cache to be copied. Some have a window of 40 tokens.
    """
    heads, kv_heads, dim = geometry
    contexts, rng = [300, 13], np.random.default_rng(dim + block_size)
    counts = [-(-length // block_size) for length in contexts]
    order, tables = rng.permutation(sum(counts)), np.zeros((2, counts[0]), np.int32)
    tables[0], tables[1, : counts[1]] = order[: counts[0]], order[counts[0] :]
    long, short = (
        table[np.arange(length) // block_size] * block_size + np.arange(length) % block_size
        for table, length in zip(tables, contexts, strict=True)
    )
    slots = ints([*long[:160], *rng.permutation(long[160:]), -1, *rng.permutation(short)])
    (k, _), (v, _) = (values(rng, slots.size, kv_heads * dim, dtype="bfloat16") for _ in range(2))
    num_slots = sum(counts) * block_size
    laid_out, plain = (Write(kv_heads, dim, block_size, "bfloat16", num_slots) for _ in range(2))
    named = [laid_out.keys.data_ptr(), laid_out.values.data_ptr()]
    for address in named:
        load_library().llmk_keep_laid_out(address)
    try:
        graphs = [write_then_attend_graph(write, geometry) for write in (laid_out, plain)]
        for queries, window in (([1, 1], 0), ([1, 1], 40), ([5, 3], 0), ([5, 3], 40), ([70, 3], 0)):
            q, _ = values(rng, sum(queries), heads * dim, dtype="bfloat16")
            mask = hiding(queries, contexts, window, tables.shape[1] * block_size)
            inputs = (k, v, slots, q, ints(tables), ints(contexts), mask, ints(queries))
            np.testing.assert_array_equal(*(exact(graph(*inputs)) for graph in graphs))
    finally:
        for address in named:
            load_library().llmk_forget_laid_out(address)
    for ours, other in ((laid_out.keys, plain.keys), (laid_out.values, plain.values)):
        assert not np.array_equal(exact(ours), exact(other))
        np.testing.assert_array_equal(np.sort(exact(ours), None), np.sort(exact(other), None))


KEYS = "layers.0.attention.key_cache"


@pytest.mark.parametrize(
    ("name", "shape", "options", "laid_out"),
    [
        (KEYS, (2, 16, 1, 16), {}, True),
        (KEYS, (2, 48, 3, 80), {}, True),
        ("layers.0.attention.value_cache", (2, 16, 1, 16), {}, True),
        (KEYS, (2, 24, 1, 16), {}, False),
        (KEYS, (2, 16, 1, 40), {}, False),
        (KEYS, (2, 16, 1, 16), {"int8_cache": True}, False),
        (KEYS, (2, 16, 1, 16), {"sinks": True}, False),
        (KEYS, (2, 16, 1, 16), {"dtype": "float16"}, False),
        ("layers.0.attention.latent_cache", (2, 16, 1, 16), {}, False),
        ("layers.0.attention.states", (2, 16, 16, 16), {}, False),
    ],
)
def test_caches_that_the_kernel_lays_out(
    name: str, shape: tuple[int, ...], options: dict[str, Any], laid_out: bool
) -> None:
    """The agent names a cache only if its type and sizes allow it, and if no other primitive reads it."""
    parallel, whole = ParallelConfig(1, 1, 1), replace(SHAPE, sinks=options.get("sinks", False))
    where = place(0, parallel)
    part = ModelPart(parallel, where, shard_of(whole, where, parallel), whole)
    try:
        made = NativeCpuOps(
            options.get("dtype", "bfloat16"), 64, part, int8_cache=options.get("int8_cache", False)
        )
        made.hooks.take_caches({name: np.zeros(shape, np.uint16)})
        assert len(made.hooks.laid_out_caches) == laid_out
        made.hooks.laid_out_caches.close()
    finally:
        hold_failures(False)  # the hooks hold failures


@pytest.mark.parametrize(("shape", "dtype"), [((2, 16, 1, 16), np.int8), ((2, 24, 1, 16), np.uint16)])
def test_a_cache_that_cannot_be_laid_out_is_refused(shape: tuple[int, ...], dtype: Any) -> None:
    caches = LaidOutCaches()
    with pytest.raises(ValueError, match="a laid out cache"):
        caches.add(np.zeros(shape, dtype))
    assert len(caches) == 0


@cache
def matmul_graph(dtype: str) -> nn.Cell:
    graph = Apply(ops.MatMul(transpose_b=True))
    rows = dynamic(None, None, dtype=DTYPES[dtype])
    graph.set_inputs(rows, rows)
    return graph


@examples
@given(any_dtype, seeds, st.integers(1, 20), st.integers(1, 130), st.integers(1, 40))
def test_matmul(dtype: str, seed: int, rows: int, depth: int, columns: int) -> None:
    """The result is x @ weight.T, summed in float32 and rounded once."""
    rng = np.random.default_rng(seed)
    (x, xx), (w, wx) = values(rng, rows, depth, dtype=dtype), values(rng, columns, depth, dtype=dtype)
    assert_rounded(matmul_graph(dtype)(x, w), xx @ wx.T, dtype, slack=1e-5)


@cache
def split_graph() -> nn.Cell:
    graph = Apply(auto_generate.SplitWithSize(), (3, 5, 8), -1)
    graph.set_inputs(dynamic(None, 16, dtype=ms.float16))
    return graph


@examples
@given(seeds, st.integers(1, 300))
def test_split_with_size(seed: int, rows: int) -> None:
    """The pieces of a tensor that is split along the last axis have the bits of the input."""
    x, x_exact = values(np.random.default_rng(seed), rows, 16, dtype="float16")
    for piece, wanted in zip(split_graph()(x), np.split(x_exact, [3, 8], -1), strict=True):
        np.testing.assert_array_equal(exact(piece), wanted)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_rows_of_no_sequence_are_refused(dtype: str, capfd: pytest.CaptureFixture[str]) -> None:
    """If there are more query rows than the sum of ``q_seq_lens``, the operator reports an error."""
    rng = np.random.default_rng(0)
    q, _ = values(rng, 3, 64, dtype=dtype)
    cached, _ = values(rng, 2, 16, 4, 16, dtype=dtype)
    graph = Paged(4, 4, 16)
    # The plugin holds the error back, because MindSpore would wait 3 seconds before it reports a failed operator.
    hold_failures(True)
    try:
        graph(q, cached, cached, ints([[1]]), ints([20]), Tensor(np.zeros((1, 1)), DTYPES[dtype]), ints([2])).asnumpy()
    finally:
        hold_failures(False)
    assert take_failure() == "PagedAttention"
    assert "PagedAttention" in capfd.readouterr().err
