"""Compares the primitives of quantised products with NumPy versions of their documentation.

docs/ascend.md lists the pages of that documentation. test_plugin_semantics.py runs this file under pytest in its own
process, which has the op plugin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Tensor, nn
from mindspore.ops import auto_generate
from plugin_semantics import DTYPES, any_dtype, assert_rounded, dynamic, exact, examples, ints, seeds, values

from agent.kernels.library import hold_failures, num_threads, set_threads, take_failure
from agent.kernels.primitive_weights import KeptWeights, PrimitiveWeight
from agent.layers.parameter import as_tensor, bind, unbound_parameter
from agent.weights.storage import from_float32


class DynamicQuant(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.primitive = auto_generate.DynamicQuantExt()

    def construct(self, x: Any) -> Any:
        return self.primitive(x, None)


class QuantMatmul(nn.Cell):
    def __init__(self, dtype: str, *, transpose: bool) -> None:
        super().__init__()
        self.primitive = auto_generate.QuantBatchMatmul(False, transpose, DTYPES[dtype])

    def construct(self, x: Any, weight: Any, scale: Any, token_scale: Any) -> Any:
        return self.primitive(x, weight, scale, None, None, token_scale)


class WeightQuantMatmul(nn.Cell):
    """A product with a weight that is a parameter, because the input of a graph cannot have a type of four bits."""

    def __init__(self, weight: Tensor, group: int, *, transpose: bool) -> None:
        super().__init__()
        self.primitive = auto_generate.WeightQuantBatchMatmul(False, transpose, group)
        self.weight = ms.Parameter(weight, name="weight", requires_grad=False)

    def construct(self, x: Any, scale: Any, offset: Any) -> Any:
        return self.primitive(x, self.weight, scale, offset, None, None, None)


class Multiply(nn.Cell):
    """Multiplies by a weight that is a parameter and shares the memory of an array, as in the models."""

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        super().__init__()
        self.primitive = ms.ops.MatMul(transpose_b=True)
        self.weight = unbound_parameter(array.shape, dtype)
        bind(self.weight, array)

    def construct(self, x: Any) -> Any:
        return self.primitive(x, self.weight)


class KeptPairs(nn.Cell):
    """Multiplies by an int4 weight whose parameters share the memory of NumPy arrays. ``offsets`` may be None."""

    def __init__(
        self, stored: np.ndarray, scale: np.ndarray, offsets: np.ndarray | None, dtype: str, group: int
    ) -> None:
        super().__init__()
        self.primitive = auto_generate.WeightQuantBatchMatmul(False, False, group)
        self.weight, self.values = _bound(stored, "int4")
        self.scale, _ = _bound(scale, dtype)
        self.offset = None if offsets is None else _bound(offsets, dtype)[0]

    def construct(self, x: Any) -> Any:
        return self.primitive(x, self.weight, self.scale, self.offset, None, None, None)


def _bound(array: np.ndarray, dtype: str) -> tuple[ms.Parameter, np.ndarray]:
    """Returns a parameter, and the array whose memory the parameter shares."""
    parameter = unbound_parameter(array.shape, dtype)
    return parameter, bind(parameter, array)


class WithoutOffset(WeightQuantMatmul):
    def construct(self, x: Any, scale: Any) -> Any:
        return self.primitive(x, self.weight, scale, None, None, None, None)


@cache
def dynamic_quant_graph(dtype: str) -> nn.Cell:
    graph = DynamicQuant()
    graph.set_inputs(dynamic(None, None, dtype=DTYPES[dtype]))
    return graph


@examples
@given(any_dtype, seeds, st.integers(1, 40), st.integers(1, 300))
def test_dynamic_quant(dtype: str, seed: int, rows: int, depth: int) -> None:
    """For each row x, scale = max|x| / 127 and y = round(x / scale). A row of zeros gives zeros.

    The error of y is at most half a step, plus the rounding of the quotient x / scale.
    """
    rng = np.random.default_rng(seed)
    x, x_exact = values(rng, rows, depth, dtype=dtype)
    if rows > 1:
        x = Tensor(np.where(np.arange(rows)[:, None] == 1, 0, x_exact).astype(np.float32)).astype(DTYPES[dtype])
        x_exact = exact(x)
    y, scale = dynamic_quant_graph(dtype)(x)
    assert (y.dtype, scale.dtype, tuple(scale.shape)) == (ms.int8, ms.float32, (rows,))
    wanted = np.abs(x_exact).max(-1) / 127
    np.testing.assert_allclose(scale.asnumpy(), wanted, rtol=1e-6)
    quotient = x_exact / np.where(wanted == 0, 1, wanted)[:, None]
    assert (np.abs(y.asnumpy() - quotient) <= 0.5 + 1e-4).all()
    assert np.abs(y.asnumpy().astype(int)).max() <= 127


@cache
def quant_matmul_graph(dtype: str, scale_type: Any, transpose: bool) -> nn.Cell:
    graph = QuantMatmul(dtype, transpose=transpose)
    bytes_, scales = dynamic(None, None, dtype=ms.int8), dynamic(None, dtype=scale_type)
    graph.set_inputs(bytes_, bytes_, scales, dynamic(None, dtype=ms.float32))
    return graph


@examples
@given(any_dtype, st.booleans(), seeds, st.integers(1, 20), st.integers(1, 200), st.integers(1, 90))
def test_quant_batch_matmul(dtype: str, transpose: bool, seed: int, rows: int, depth: int, columns: int) -> None:
    """The result is (x1 @ x2) * scale * pertoken_scale.

    The sum of integers is exact. The scales multiply in float32, and the result is rounded once.
    """
    rng = np.random.default_rng(seed)
    x, w = (rng.integers(-128, 128, (count, depth)).astype(np.int8) for count in (rows, columns))
    scale, token_scale = (rng.uniform(1e-4, 0.1, count).astype(np.float32) for count in (columns, rows))
    scale_type = ms.bfloat16 if dtype == "bfloat16" and seed % 2 else ms.float32
    scales = Tensor(scale).astype(scale_type)
    weight = w if transpose else np.ascontiguousarray(w.T)
    graph = quant_matmul_graph(dtype, scale_type, transpose)
    out = graph(Tensor(x), Tensor(weight), scales, Tensor(token_scale))
    wanted = x.astype(np.float64) @ w.T.astype(np.float64) * exact(scales) * token_scale[:, None]
    assert_rounded(out, wanted, dtype, slack=1e-6)


class StaticMatmul(nn.Cell):
    """A linear layer whose input has one fixed scale (static quantisation), with a weight that is a parameter.

    It also returns the quantised input.
    """

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.quantise = auto_generate.QuantV2()
        self.multiply = auto_generate.QuantBatchMatmul(False, True, DTYPES[dtype])

    def construct(self, x: Any, weight: Any, scale: Any, input_scale: Any, input_offset: Any, bias: Any) -> Any:
        integers = self.quantise(x, input_scale, input_offset, False, "ROUND", ms.int8)
        return integers, self.multiply(integers, weight, scale, None, bias, None)


@cache
def static_graph() -> nn.Cell:
    graph = StaticMatmul("bfloat16")
    x, vector = dynamic(None, None, dtype=ms.bfloat16), dynamic(None, dtype=ms.bfloat16)
    scales, sums = dynamic(None, dtype=ms.float32), dynamic(None, dtype=ms.int32)
    graph.set_inputs(x, dynamic(None, None, dtype=ms.int8), scales, vector, vector, sums)
    return graph


@examples
@given(st.booleans(), seeds, st.integers(1, 20), st.integers(1, 200), st.integers(1, 90))
def test_static_product(single: bool, seed: int, rows: int, depth: int, columns: int) -> None:
    """The input x becomes q = round(x * scale + offset), with ties to even and a range from -128 to 127.

    The result is (q @ weight + bias) * scale of the weight. Every integer is exact, and the result is rounded once.
    Some inputs lie outside of the range.
    """
    rng = np.random.default_rng(seed)
    x, x_exact = values(rng, rows, depth, dtype="bfloat16")
    w = rng.integers(-128, 128, (columns, depth)).astype(np.int8)
    count = 1 if single else depth
    inverse = Tensor(rng.uniform(5, 80, count).astype(np.float32)).astype(ms.bfloat16)
    offset = Tensor(rng.integers(-60, 60, count).astype(np.float32)).astype(ms.bfloat16)
    scale = rng.uniform(1e-4, 0.1, columns).astype(np.float32)
    bias = rng.integers(-100_000, 100_000, columns).astype(np.int32)
    found, out = static_graph()(x, Tensor(w), Tensor(scale), inverse, offset, Tensor(bias))
    shifted = x_exact.astype(np.float32) * exact(inverse).astype(np.float32) + exact(offset).astype(np.float32)
    q = np.clip(np.rint(shifted), -128, 127)
    np.testing.assert_array_equal(found.asnumpy(), q)
    sums = q.astype(np.int64) @ w.T.astype(np.int64) + bias
    assert_rounded(out, sums * scale.astype(np.float64), "bfloat16", slack=1e-6)


def test_a_kept_static_weight_is_the_same_weight() -> None:
    """A packed static weight contains its sum offsets, the constant part of each output's sum.

    A product of the same weight with other sum offsets is refused.
    """
    rng = np.random.default_rng(4)
    w, scale = rng.integers(-128, 128, (70, 4096)).astype(np.int8), rng.uniform(0.01, 0.1, 70).astype(np.float32)
    sums = rng.integers(-1000, 1000, 70).astype(np.int32)
    arguments = (values(rng, 3, 4096, dtype="bfloat16")[0], as_tensor(w), as_tensor(scale))
    inputs = [Tensor(np.full(4096, value, np.float32)).astype(ms.bfloat16) for value in (20.0, 3.0)]
    plain = static_graph()(*arguments, *inputs, as_tensor(sums))[1].asnumpy()
    kept = KeptWeights()
    try:
        kept.keep(PrimitiveWeight(w, "int8", scales=scale, sum_offsets=sums), release=True)
        again = static_graph()(*arguments, *inputs, as_tensor(sums))[1].asnumpy()
        np.testing.assert_array_equal(again, plain)
        assert refusing(lambda: static_graph()(*arguments, *inputs, as_tensor(sums.copy()))[1]) == "QuantBatchMatmul"
    finally:
        kept.close()


def pairs(integers: np.ndarray) -> Tensor:
    """Packs int4 integers [rows, columns] for the primitive.

    Each byte has two columns, and the even column is in the low bits.
    """
    low, high = integers[:, 0::2], integers[:, 1::2]
    return Tensor(((low & 15) | (high << 4)).astype(np.int8), dtype=ms.qint4x2)


def dequantised(w: np.ndarray, scale: np.ndarray, offset: np.ndarray | int, group: int) -> np.ndarray:
    """Returns the floats [columns, depth] that the integers ``w`` stand for.

    Each float is (w + offset) * scale. Scale and offset are [columns, groups].
    """
    spread = [np.repeat(a, group or w.shape[1], 1)[:, : w.shape[1]] if np.ndim(a) else a for a in (scale, offset)]
    out: np.ndarray = (w + spread[1]) * spread[0]
    return out


@examples
@given(
    any_dtype, seeds, st.integers(1, 20), st.integers(1, 5), st.integers(1, 45), st.booleans(), st.booleans(),
    st.sampled_from([0, 32, 64]), st.booleans(),
)  # fmt: skip
def test_weight_quant_batch_matmul(
    dtype: str, seed: int, rows: int, units: int, half_columns: int, int4: bool, transpose: bool, group: int,
    with_offset: bool,
) -> None:  # fmt: skip
    """The result is x @ ((weight + offset) * scale), where a group of inputs shares scale and offset.

    If ``transpose`` is set, the weight is [columns, depth] and the scales are [columns, groups].
    """
    rng = np.random.default_rng(seed)
    depth, columns, with_offset = 32 * units, 2 * half_columns, with_offset and int4
    groups = -(-depth // group) if group else 1
    low, high = (-8, 8) if int4 else (-128, 128)
    w = rng.integers(low, high, (columns, depth))
    x, x_exact = values(rng, rows, depth, dtype=dtype)
    scale = Tensor(rng.uniform(0.001, 0.1, (columns, groups)).astype(np.float32)).astype(DTYPES[dtype])
    offset = ints(rng.integers(-8, 9, (columns, groups)), np.float32).astype(DTYPES[dtype])

    def laid_out(array: Tensor) -> Tensor:
        numbers = exact(array) if transpose else exact(array).T
        return Tensor((numbers if group else numbers.reshape(-1)).astype(np.float32)).astype(DTYPES[dtype])

    weight = w if transpose else np.ascontiguousarray(w.T)
    stored = pairs(weight) if int4 else Tensor(weight.astype(np.int8))
    if with_offset:
        out = WeightQuantMatmul(stored, group, transpose=transpose)(x, laid_out(scale), laid_out(offset))
    else:
        out = WithoutOffset(stored, group, transpose=transpose)(x, laid_out(scale))
    wanted = x_exact @ dequantised(w, exact(scale), exact(offset) if with_offset else 0, group).T
    assert_rounded(out, wanted, dtype, slack=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_kept_weight_is_the_same_weight(dtype: str, rows: int) -> None:
    """MatMul gives the same result with a weight that is already packed, and whose original memory is released."""
    rng = np.random.default_rng(3)
    w = from_float32(rng.standard_normal((80, 4096)).astype(np.float32), dtype)
    x, x_exact = values(rng, rows, 4096, dtype=dtype)
    w_exact = exact(as_tensor(w))
    graph = Multiply(w, dtype)
    graph.set_inputs(dynamic(None, None, dtype=DTYPES[dtype]))
    kept = KeptWeights()
    kept.keep(PrimitiveWeight(w, dtype), release=True)
    try:
        assert_rounded(graph(x), x_exact @ w_exact.T, dtype, slack=1e-5)
        with pytest.raises(Exception, match="packing a"):
            kept.keep(PrimitiveWeight(w, dtype), release=False)
    finally:
        kept.close()
    assert np.count_nonzero(w) < w.size / 2, "the memory was given back"
    assert np.count_nonzero(w_exact) > w.size / 2


def refusing(call: Callable[[], Any]) -> str | None:
    """Returns the name of the operator that refuses its inputs, or None.

    The plugin holds the error back, because MindSpore would wait 3 seconds before it reports a failed operator.
    """
    hold_failures(True)
    try:
        call().asnumpy()
    finally:
        hold_failures(False)
    return take_failure()


@examples
@given(
    any_dtype, seeds, st.sampled_from([1, 2, 5, 17, 40]), st.integers(1, 6), st.integers(1, 70),
    st.sampled_from([0, 32, 64, 128]), st.booleans(),
)  # fmt: skip
def test_a_kept_int4_weight_is_the_same_weight(
    dtype: str, seed: int, rows: int, units: int, half_columns: int, group: int, with_offset: bool
) -> None:
    """A product gives the same bits with an int4 weight that is already packed, also for a row that is computed alone.

    The weight is [depth, columns], with two columns in a byte.
    """
    rng = np.random.default_rng(seed)
    depth, columns = 64 * units, 2 * half_columns
    groups = -(-depth // group) if group else 1
    w, offset = rng.integers(-8, 8, (depth, columns)), rng.integers(-8, 9, (groups, columns)) * with_offset
    stored = ((w[:, 0::2] & 15) | (w[:, 1::2] << 4)).astype(np.int8)
    scale = from_float32(rng.uniform(0.001, 0.1, (groups, columns)).astype(np.float32), dtype)
    offsets = from_float32(offset.astype(np.float32), dtype) if with_offset else None
    x, x_exact = values(rng, rows, depth, dtype=dtype)
    graph = KeptPairs(stored, scale, offsets, dtype, group)
    kept = KeptWeights()
    weight = PrimitiveWeight(graph.values, "int4", False, scale, offsets, dtype, group, float_products=True)
    kept.keep(weight, release=False)
    try:
        graph.values[:] = 0  # only the packed copy still has the values
        out = graph(x)
        spread = [np.repeat(a, group or depth, 0)[:depth] for a in (exact(as_tensor(scale)), offset)]
        assert_rounded(out, x_exact @ ((w + spread[1]) * spread[0]), dtype, slack=1e-5)
        np.testing.assert_array_equal(exact(graph(x[:1])), exact(out)[:1])
    finally:
        kept.close()


def multiplication(form: str, rng: np.random.Generator) -> tuple[Callable[[int], Tensor], PrimitiveWeight]:
    """Returns a weight of 80 columns, and a function that multiplies some rows by it."""
    columns, depth = 80, 256
    x, _ = values(rng, 70, depth, dtype="bfloat16")
    integers = rng.integers(-128, 128, (columns, depth)).astype(np.int8)
    scale = rng.uniform(1e-4, 0.1, columns).astype(np.float32)
    if form == "float":
        w = from_float32(rng.standard_normal((columns, depth)).astype(np.float32), "bfloat16")
        graph = Multiply(w, "bfloat16")
        graph.set_inputs(dynamic(None, None, dtype=ms.bfloat16))
        return lambda rows: graph(x[:rows]), PrimitiveWeight(w, "bfloat16")
    if form == "int4":
        scales, offsets = (
            from_float32(each.astype(np.float32), "bfloat16")
            for each in (rng.uniform(0.001, 0.1, (8, columns)), rng.integers(-8, 9, (8, columns)))
        )
        stored = rng.integers(-128, 128, (depth, columns // 2)).astype(np.int8)
        pairs_graph = KeptPairs(stored, scales, offsets, "bfloat16", 32)
        pairs_graph.set_inputs(dynamic(None, None, dtype=ms.bfloat16))
        weight = PrimitiveWeight(
            pairs_graph.values, "int4", False, scales, offsets, "bfloat16", 32, float_products=True
        )
        return lambda rows: pairs_graph(x[:rows]), weight
    weight, scale_tensor = as_tensor(integers), as_tensor(scale)
    if form == "int8":
        x_integers, row_scales = dynamic_quant_graph("bfloat16")(x)
        product = quant_matmul_graph("bfloat16", ms.float32, True)
        return (
            lambda rows: product(x_integers[:rows], weight, scale_tensor, row_scales[:rows]),
            PrimitiveWeight(integers, "int8", scales=scale),
        )
    sums = rng.integers(-100_000, 100_000, columns).astype(np.int32)
    inputs = [Tensor(rng.uniform(5, 40, depth).astype(np.float32)).astype(ms.bfloat16) for _ in range(2)]
    sum_tensor = as_tensor(sums)
    return (
        lambda rows: static_graph()(x[:rows], weight, scale_tensor, *inputs, sum_tensor)[1],
        PrimitiveWeight(integers, "int8", scales=scale, sum_offsets=sums),
    )


@pytest.mark.parametrize("form", ["float", "int8", "static", "int4"])
def test_a_gated_weight_gives_the_bits_of_the_same_weight_without_a_gate(form: str) -> None:
    """A weight is kept with its gate and factor side by side. Its two halves of 40 columns do not fill panels."""
    multiply, weight = multiplication(form, np.random.default_rng(6))
    found = []
    for gated in (False, True):
        kept = KeptWeights()
        kept.keep(replace(weight, gated=gated), release=False)
        try:
            found.append([exact(multiply(rows)) for rows in (1, 5, 17, 70)])
        finally:
            kept.close()
    for plain, ours in zip(*found, strict=True):
        assert len(np.unique(plain)) > 40
        np.testing.assert_array_equal(ours, plain)


class Grouped(nn.Cell):
    """A grouped product, in one of the layouts of ``agent.weights.forms``.

    The parameters share the memory of NumPy arrays.
    """

    def __init__(self, form: str, weight: np.ndarray, scale: np.ndarray, offset: np.ndarray, dtype: str) -> None:
        super().__init__()
        self.primitive = auto_generate.GroupedMatmulV4()
        self.form = form
        stored = {"float": dtype, "int4": "int4"}.get(form, "int8")
        self.weight, self.values = _bound(weight, stored)
        if form == "float":
            return
        scale_type = "float32" if scale.dtype == np.float32 else dtype
        self.scale, self.scales = _bound(scale, scale_type)
        self.offset, self.offsets = _bound(offset, dtype)

    def construct(self, x: Any, token_scale: Any, groups: Any) -> Any:
        end = (groups, None, None, None, 3, 0, 1)
        if self.form == "float":
            return self.primitive([x], [self.weight], None, None, None, None, None, None, *end)[0]
        if self.form == "int8":
            scales = ([self.scale], None, None, None, [token_scale])
            return self.primitive([x], [self.weight], None, *scales, *end)[0]
        scales = ([self.scale], [self.offset])
        return self.primitive([x], [self.weight], None, None, None, *scales, None, *end)[0]


GROUPED_FORMS = ("float", "int8", "int8_weight_only", "int4", "int4 rows")


class GroupedCase:
    """Random weights [experts, depth, columns] in one layout, and the exact values that they stand for.

    The layout ``int4 rows`` has a scale and a zero point for each output. The layout ``int4`` has a scale for each
    group and no zero points.
    """

    def __init__(self, form: str, dtype: str, seed: int, sizes: tuple[int, int, int], group: int) -> None:
        self.form, self.dtype = form.removesuffix(" rows"), dtype
        self.rng = rng = np.random.default_rng(seed)
        self.experts, self.depth, self.columns = experts, depth, columns = sizes
        self.group = group if form == "int4" else 0
        shape = (experts, depth // self.group, columns) if self.group else (experts, columns)
        low, high = (-8, 8) if self.form == "int4" else (-128, 128)
        integers = rng.integers(low, high, sizes)
        scale = rng.uniform(0.001, 0.1, shape).astype(np.float32)
        self.scale_type = "float32" if form == "int8" and dtype == "float16" else dtype
        self.scale = from_float32(scale, self.scale_type)
        offset = rng.integers(-8, 9, shape) * (form == "int4 rows")
        self.offset = from_float32(offset.astype(np.float32), dtype)
        self.weight = integers.astype(np.int8)
        if self.form == "int4":
            self.weight = ((integers[..., 0::2] & 15) | (integers[..., 1::2] << 4)).astype(np.int8)
        repeat = self.group or depth
        spread = [np.repeat(a.reshape(experts, -1, columns), repeat, 1) for a in (self.exact_scale(), offset)]
        self.exact = (integers + spread[1]) * spread[0]
        if self.form == "float":
            self.weight = from_float32(rng.standard_normal(sizes).astype(np.float32), dtype)
            self.exact = exact(as_tensor(self.weight))

    def exact_scale(self) -> np.ndarray:
        return exact(as_tensor(self.scale))

    def graph(self) -> Grouped:
        graph = Grouped(self.form, self.weight, self.scale, self.offset, self.dtype)
        x = dynamic(None, None, dtype=ms.int8 if self.form == "int8" else DTYPES[self.dtype])
        graph.set_inputs(x, dynamic(None, dtype=ms.float32), dynamic(None, dtype=ms.int64))
        return graph

    def rows(self, counts: np.ndarray) -> tuple[Tensor, Tensor, np.ndarray]:
        """Returns input rows sorted by expert, the scale of each row, and the exact values of the rows."""
        count = int(counts.sum())
        token_scale = self.rng.uniform(1e-4, 0.1, count).astype(np.float32)
        if self.form == "int8":
            integers = self.rng.integers(-128, 128, (count, self.depth)).astype(np.int8)
            return Tensor(integers), Tensor(token_scale), integers * token_scale[:, None].astype(np.float64)
        x, x_exact = values(self.rng, count, self.depth, dtype=self.dtype)
        return x, Tensor(token_scale), x_exact

    def wanted(self, x_exact: np.ndarray, counts: np.ndarray) -> np.ndarray:
        owner = np.repeat(np.arange(self.experts), counts)
        return np.stack([row @ self.exact[expert] for row, expert in zip(x_exact, owner, strict=True)])

    def kept(self, graph: Grouped) -> PrimitiveWeight:
        if self.form == "float":
            return PrimitiveWeight(graph.values, self.dtype, transposed=False)
        int4, weight_only = self.form == "int4", self.form != "int8"
        return PrimitiveWeight(
            graph.values, "int4" if int4 else "int8", False, graph.scales, graph.offsets if weight_only else None,
            self.scale_type, self.group, float_products=weight_only,
        )  # fmt: skip


any_sizes = st.tuples(
    st.integers(1, 5), st.integers(1, 5).map(lambda n: 32 * n), st.integers(1, 50).map(lambda n: 2 * n)
)


@examples
@given(st.sampled_from(GROUPED_FORMS), any_dtype, seeds, any_sizes, st.booleans())
def test_grouped_matmul(form: str, dtype: str, seed: int, sizes: tuple[int, int, int], whole: bool) -> None:
    """The rows of each expert are multiplied by the expert's weight. Some experts have no rows.

    The result depends on the layout:

    - Floats: x @ weight.
    - int8: (x @ weight) * scale * per_token_scale.
    - Weight-only layouts: x @ ((weight + antiquant_offset) * antiquant_scale). A scale covers a group of inputs,
      or all inputs.
    """
    case = GroupedCase(form, dtype, seed, sizes, sizes[1] if whole else 32)
    counts = case.rng.integers(0, 5, case.experts)
    counts[case.rng.integers(case.experts)] += 1
    x, token_scale, x_exact = case.rows(counts)
    out = case.graph()(x, token_scale, Tensor(counts.astype(np.int64)))
    assert_rounded(out, case.wanted(x_exact, counts), dtype, slack=1e-5)


@pytest.mark.parametrize("form", GROUPED_FORMS)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_kept_experts_are_the_same_experts(form: str, dtype: str) -> None:
    """Grouped products give the same results with weights that are already packed, and whose original memory is
    released.

    A row has the same bits alone, with any other rows and with any number of threads.
    """
    case = GroupedCase(form, dtype, 5, (6, 160, 150), 32)
    graph, counts = case.graph(), np.array([3, 0, 40, 1, 0, 7])
    x, token_scale, x_exact = case.rows(counts)
    kept, threads = KeptWeights(), num_threads()
    kept.keep(case.kept(graph), release=True)
    try:
        out = graph(x, token_scale, Tensor(counts))
        assert_rounded(out, case.wanted(x_exact, counts), dtype, slack=1e-5)
        for number, places in enumerate(
            ([0], [42], [2, 43], [44, 45, 50], [1, 5, 20, 43, 46], range(3, 43), range(51))
        ):
            set_threads(1 + number % 3)
            owners = np.repeat(np.arange(6), counts)[places]
            some = (Tensor(np.ascontiguousarray(each.asnumpy()[places])) for each in (x, token_scale))
            part = graph(*some, Tensor(np.bincount(owners, minlength=6)))
            np.testing.assert_array_equal(exact(part), exact(out)[places])
    finally:
        set_threads(threads)
        kept.close()


def test_rows_behind_the_last_group_are_zeros() -> None:
    case = GroupedCase("int8", "float16", 6, (2, 64, 32), 0)
    x, token_scale, x_exact = case.rows(np.array([2, 5]))
    out = exact(case.graph()(x, token_scale, Tensor([2, 3])))
    np.testing.assert_array_equal(out[5:], 0)
    np.testing.assert_allclose(out[:5], case.wanted(x_exact[:5], np.array([2, 3])), rtol=2e-3)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"scale": np.ones((2, 31), np.float32)}, "62 scales in 2 dimensions for 2 weights of depth 64 and 32 columns"),
        ({"token_scale": np.ones(6, np.float32)}, "6 scales of tokens for 7 rows"),
        ({"counts": [3, 5]}, "group_list[1] is 5; it must be from 0 to 7"),
        ({"counts": [3, 2, 2]}, "3 groups for 2 weights"),
    ],
)
def test_grouped_products_that_do_not_fit_are_refused(
    change: dict[str, Any], problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    case = GroupedCase("int8", "float16", 7, (2, 64, 32), 0)
    x, token_scale, _ = case.rows(np.array([3, 4]))
    case.scale = change.get("scale", case.scale)
    graph = Grouped(case.form, case.weight, case.scale, case.offset, case.dtype)
    given = (x, Tensor(change.get("token_scale", token_scale.asnumpy())), Tensor(change.get("counts", [3, 4])))
    assert refusing(lambda: graph(*given)) == "GroupedMatmulV4"
    assert problem in capfd.readouterr().err


def test_a_kept_weight_with_other_scales_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(4)
    w, scale = rng.integers(-128, 128, (16, 64)).astype(np.int8), np.full(16, 0.5, np.float32)
    kept = KeptWeights()
    kept.keep(PrimitiveWeight(w, "int8", scales=scale), release=False)
    x, token_scale = Tensor(np.ones((2, 64), np.int8)), Tensor(np.ones(2, np.float32))
    graph, same, other = QuantMatmul("float16", transpose=True), Tensor.from_numpy(scale), Tensor(scale)
    try:
        np.testing.assert_allclose(
            exact(graph(x, Tensor.from_numpy(w), same, token_scale)), np.tile(w.sum(1) * 0.5, (2, 1)), rtol=1e-3
        )
        assert refusing(lambda: graph(x, Tensor.from_numpy(w), other, token_scale)) == "QuantBatchMatmul"
        assert "or with other scales" in capfd.readouterr().err
    finally:
        kept.close()


@pytest.mark.parametrize("offset", [0.5, 9, -9])
def test_offsets_that_no_zero_point_makes_are_refused(offset: float, capfd: pytest.CaptureFixture[str]) -> None:
    offsets = Tensor(np.full(4, offset, np.float16))
    graph = WeightQuantMatmul(pairs(np.zeros((32, 4), np.int64)), 0, transpose=False)
    assert refusing(lambda: graph(Tensor(np.ones((1, 32), np.float16)), offsets, offsets)) == "WeightQuantBatchMatmul"
    assert f"an offset is {offset:g}" in capfd.readouterr().err
