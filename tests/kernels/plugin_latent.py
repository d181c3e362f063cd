"""Compares the native primitives of DeepSeek's layers with NumPy versions of their documentation, on random shapes.

test_plugin_semantics.py runs this file under pytest in its own process, which has the op plugin.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Tensor, nn, ops
from mindspore.ops import auto_generate
from plugin_semantics import DTYPES, Apply, any_dtype, assert_rounded, dynamic, exact, examples, ints, seeds, values

from agent.backends.native.experts import _LimitedRouter
from agent.kernels.library import hold_failures, take_failure
from agent.kernels.primitive_weights import KeptWeights, PrimitiveWeight
from agent.layers.parameter import as_tensor
from agent.weights.storage import from_float32
from llm_serving.model.deepseek import Routing
from llm_serving.model.families import Experts
from support.kernel_calls import EPSILON

ORDERS = [(1, 0, 2), (2, 1, 0), (0, 2, 1), (0, 1, 2), (2, 0, 1)]


@cache
def transposes(order: tuple[int, ...], kind: Any) -> nn.Cell:
    graph = Apply(ops.Transpose(), order)
    graph.set_inputs(dynamic(None, None, None, dtype=kind))
    return graph


@examples
@given(st.sampled_from(ORDERS), seeds, st.tuples(*[st.integers(1, 9)] * 3))
def test_transpose(order: tuple[int, ...], seed: int, shape: tuple[int, ...]) -> None:
    numbers = np.random.default_rng(seed).integers(-(2**31), 2**31, shape, np.int32)
    np.testing.assert_array_equal(transposes(order, ms.int32)(Tensor(numbers)).asnumpy(), numbers.transpose(order))


class Join(nn.Cell):
    def __init__(self, axis: int) -> None:
        super().__init__()
        self.primitive = ops.Concat(axis)

    def construct(self, first: Any, second: Any) -> Any:
        return self.primitive((first, second))


@cache
def joins(axis: int) -> nn.Cell:
    graph = Join(axis)
    piece = dynamic(None, None, None, dtype=ms.float16)
    graph.set_inputs(piece, piece)
    return graph


@examples
@given(st.integers(-1, 2), seeds, st.tuples(*[st.integers(1, 7)] * 4))
def test_concat(axis: int, seed: int, sizes: tuple[int, ...]) -> None:
    shapes = [list(sizes[:3]), list(sizes[:3])]
    shapes[1][axis] = sizes[3]
    (a, of_a), (b, of_b) = (values(np.random.default_rng(seed), *shape, dtype="float16") for shape in shapes)
    np.testing.assert_array_equal(exact(joins(axis)(a, b)), np.concatenate([of_a, of_b], axis))


@cache
def batches(dtype: str, *transposed: bool) -> nn.Cell:
    graph = Apply(ops.BatchMatMul(*transposed))
    matrices = dynamic(None, None, None, dtype=DTYPES[dtype])
    graph.set_inputs(matrices, matrices)
    return graph


@examples
@given(any_dtype, seeds, st.booleans(), st.booleans(), st.tuples(*[st.integers(1, 20)] * 4))
def test_batch_matmul(dtype: str, seed: int, x_first: bool, y_first: bool, sizes: tuple[int, ...]) -> None:
    """Each matrix of the first axis has its own product, with any transposes."""
    rng, (count, rows, depth, columns) = np.random.default_rng(seed), sizes
    x, of_x = values(rng, count, *((depth, rows) if x_first else (rows, depth)), dtype=dtype)
    y, of_y = values(rng, count, *((columns, depth) if y_first else (depth, columns)), dtype=dtype)
    wanted = (of_x.swapaxes(1, 2) if x_first else of_x) @ (of_y.swapaxes(1, 2) if y_first else of_y)
    assert_rounded(batches(dtype, x_first, y_first)(x, y), wanted, dtype, slack=1e-5)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_kept_weights_of_heads(dtype: str) -> None:
    """A row of a product with packed (kept) weights has the same bits among any other rows. The test also shows that
    the packed weights are used.
    """
    rng = np.random.default_rng(3)
    (x, of_x), (_, of_y) = values(rng, 3, 300, 24, dtype=dtype), values(rng, 3, 24, 40, dtype=dtype)
    weight = from_float32(of_y.astype(np.float32), dtype)
    kept = KeptWeights()
    try:
        kept.keep(PrimitiveWeight(weight, dtype, transposed=False), release=False)
        graph, parameter = batches(dtype, False, False), as_tensor(weight)
        whole = graph(x, parameter)
        assert_rounded(whole, of_x @ of_y, dtype, slack=1e-5)
        alone = graph(Tensor(of_x[:, 17:18].astype(np.float32)).astype(DTYPES[dtype]), parameter)
        np.testing.assert_array_equal(exact(alone), exact(whole)[:, 17:18])
    finally:
        kept.close()


@cache
def routers(*settings: Any) -> nn.Cell:
    graph = Apply(auto_generate.FusedAddTopKDiv(), *settings, None, None, False)
    graph.set_inputs(dynamic(None, None, dtype=ms.float32), dynamic(None, dtype=ms.float32))
    return graph


@examples
@given(seeds, st.sampled_from([(1, 1, 4), (4, 2, 3), (8, 4, 8)]), st.booleans(), st.integers(1, 30))
def test_fused_add_top_k_div(seed: int, form: tuple[int, ...], is_norm: bool, rows: int) -> None:
    """Groups are ranked by the sum of their two largest corrected sigmoids, and experts within the best groups."""
    (groups, chosen_groups, k), rng = form, np.random.default_rng(seed)
    logits = rng.standard_normal((rows, 32)).astype(np.float32)
    correction = rng.standard_normal(32).astype(np.float32)
    weights, ids = routers(groups, chosen_groups, 2, k, 0, is_norm, 2.5)(Tensor(logits), Tensor(correction))
    scores = 1 / (1 + np.exp(-logits))
    rankings = scores + correction
    ranks = np.sort(rankings.reshape(rows, groups, -1), -1)[..., -2:].sum(-1)
    worst = np.argsort(-ranks, -1, kind="stable")[:, chosen_groups:]
    rankings.reshape(rows, groups, -1)[np.arange(rows)[:, None], worst] = -np.inf
    wanted = np.argsort(-rankings, -1, kind="stable")[:, :k]
    np.testing.assert_array_equal(ids.asnumpy(), wanted)
    shares = np.take_along_axis(scores, wanted, -1)
    shares = shares / shares.sum(-1, keepdims=True) if is_norm else shares
    np.testing.assert_allclose(weights.asnumpy(), 2.5 * shares, rtol=1e-5)


class Router(nn.Cell):
    """The router of DeepSeek V2 with groups. Its numbers of experts are multiples of ``groups``."""

    def __init__(self, experts: int, per_token: int, routing: Routing) -> None:
        super().__init__()
        self.router = _LimitedRouter(Experts(experts, per_token, 16, normalised=False), routing)

    def construct(self, logits: Any) -> Any:
        return self.router(logits, None)


@cache
def limited_routers(experts: int, per_token: int, routing: Routing) -> nn.Cell:
    graph = Router(experts, per_token, routing)
    graph.set_inputs(dynamic(None, experts, dtype=ms.float32))
    return graph


SIZES = [(12, 3, Routing(False, 4, 2, False, 2.0)), (160, 6, Routing(False, 8, 3, False, 16.0)),
         (8, 5, Routing(False, 8, 5))]  # fmt: skip
"""Experts, experts of a token, and rules of the router. The second entry has the numbers of DeepSeek V2 (236B)."""


@examples
@given(st.sampled_from(SIZES), seeds, st.integers(1, 30), st.sampled_from([0.25, 60.0]))
def test_groups_limit_the_experts_of_a_softmax(
    sizes: tuple[int, int, Routing], seed: int, rows: int, scale: float
) -> None:
    """Groups are ranked by their best score, and experts by their scores within the best groups. The first of equals
    wins. With the larger scale, most scores are 0, also those of chosen experts.
    """
    (experts, per_token, routing), rng = sizes, np.random.default_rng(seed)
    logits = (rng.integers(-9, 10, (rows, experts)) * scale).astype(np.float32)
    weights, ids = limited_routers(*sizes)(Tensor(logits))
    parts = np.exp(logits - logits.max(-1, keepdims=True))
    scores = parts / parts.sum(-1, keepdims=True)
    rankings = scores.reshape(rows, routing.groups, -1).copy()
    worst = np.argsort(-rankings.max(-1), -1, kind="stable")[:, routing.chosen_groups :]
    rankings[np.arange(rows)[:, None], worst] = -np.inf
    wanted = np.argsort(-rankings.reshape(rows, experts), -1, kind="stable")[:, :per_token]
    assert ids.dtype == ms.int32
    np.testing.assert_array_equal(ids.asnumpy(), wanted)
    np.testing.assert_allclose(
        weights.asnumpy(), routing.factor * np.take_along_axis(scores, wanted, -1), rtol=1e-5, atol=1e-38
    )


@cache
def softmaxes(axis: int, kind: Any) -> nn.Cell:
    graph = Apply(auto_generate.Softmax(axis))
    graph.set_inputs(dynamic(None, None, None, dtype=kind))
    return graph


@examples
@given(any_dtype, seeds, st.integers(-3, 2), st.tuples(*[st.integers(1, 9)] * 3))
def test_softmax(dtype: str, seed: int, axis: int, shape: tuple[int, ...]) -> None:
    x, of_x = values(np.random.default_rng(seed), *shape, dtype=dtype)
    parts = np.exp(of_x - of_x.max(axis, keepdims=True))
    assert_rounded(softmaxes(axis, DTYPES[dtype])(x), parts / parts.sum(axis, keepdims=True), dtype, slack=1e-6)


class Latent(nn.Cell):
    """PagedAttention over one cache, whose rows begin with the values."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.primitive = auto_generate.PagedAttention(heads, 0.25, 1, mla_v_dim=width)

    def construct(self, query: Any, rows: Any, tables: Any, lens: Any, mask: Any, q_lens: Any) -> Any:
        return self.primitive(query, rows, rows, tables, lens, None, None, mask, q_lens)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_attention_over_latent_vectors(dtype: str) -> None:
    """The heads share the cached rows. The result has the first ``mla_v_dim`` elements of the attended rows."""
    rng, heads, dim, width = np.random.default_rng(5), 4, 48, 32
    q_lens, lens, blocks = [1, 5], [19, 21], [[3, 1], [0, 2]]
    query, of_query = values(rng, sum(q_lens), heads * dim, dtype=dtype)
    cache_rows, of_rows = values(rng, 4, 16, 1, dim, dtype=dtype)
    mask = Tensor(np.zeros((1, 1)), DTYPES[dtype])
    found = Latent(heads, width)(query, cache_rows, ints(blocks), ints(lens), mask, ints(q_lens))
    wanted, row = [], 0
    for seq, count in enumerate(q_lens):
        keys = np.concatenate([of_rows[block] for block in blocks[seq]])[: lens[seq], 0]
        for index in range(count):
            seen = keys[: lens[seq] - count + index + 1]
            scores = of_query[row].reshape(heads, dim) @ seen.T * 0.25
            parts = np.exp(scores - scores.max(-1, keepdims=True))
            wanted.append((parts / parts.sum(-1, keepdims=True) @ seen)[:, :width].reshape(-1))
            row += 1
    assert_rounded(found, np.stack(wanted), dtype, slack=2 * EPSILON[dtype])


def test_two_caches_are_refused_with_latent_vectors() -> None:
    class TwoCaches(Latent):
        def construct(self, query: Any, rows: Any, others: Any, tables: Any, lens: Any, mask: Any) -> Any:
            return self.primitive(query, rows, others, tables, lens, None, None, mask, None)

    rng = np.random.default_rng(0)
    query, _ = values(rng, 1, 64, dtype="float16")
    (rows, _), (others, _) = (values(rng, 1, 16, 1, 16, dtype="float16") for _ in range(2))
    hold_failures(True)
    try:
        mask = Tensor(np.zeros((1, 1)), ms.float16)
        TwoCaches(4, 8)(query, rows, others, ints([[0]]), ints([3]), mask).asnumpy()
    finally:
        hold_failures(False)
    assert take_failure() == "PagedAttention"
