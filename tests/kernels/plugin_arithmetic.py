"""Compares small operators, which the models use between the inference primitives, with NumPy.

The graphs have dynamic shapes. test_plugin_semantics.py runs this file under pytest in its own process, which has the
op plugin.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

from agent.kernels.library import library_path, load_library

os.environ["MS_OP_PLUGIN_PATH"] = str(library_path())

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from agent.device_sampling import cells

ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": "O0"})
ms.set_device("CPU")

FLOATS = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}
INTEGERS = {"int32": ms.int32, "int64": ms.int64, "uint8": ms.uint8, "int8": ms.int8}
TYPES = {**FLOATS, **INTEGERS}
PAIRS: dict[str, Any] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "RealDiv": np.divide,
    "Minimum": np.minimum,
    "Maximum": np.maximum,
    "Equal": np.equal,
    "Greater": np.greater,
    "LessEqual": np.less_equal,
}
SHAPES = (
    ((7, 33), (7, 33)),
    ((7, 33), (33,)),
    ((7, 1), (1, 33)),
    ((1, 33), (7, 1)),
    ((3, 1, 5), (4, 1)),
    ((2, 3, 4, 5), (3, 1, 5)),
    ((9,), (1,)),
    ((1,), (9,)),
    ((), (3, 4)),
    ((40_000,), (40_000,)),
    ((3, 20_000), (3, 1)),
    ((0, 4), (4,)),
)


class AllPairs(nn.Cell):
    """Runs every primitive of ``PAIRS`` on two tensors of any shape. It is compiled once for each type."""

    def __init__(self, names: tuple[str, ...], kind: Any) -> None:
        super().__init__()
        self.primitives = [getattr(ops, name)() for name in names]
        self.set_inputs(Tensor(shape=None, dtype=kind), Tensor(shape=None, dtype=kind))

    def construct(self, a: Any, b: Any) -> Any:
        found = ()
        for primitive in self.primitives:
            found += (primitive(a, b),)
        return found


@cache
def graph_of_pairs(kind: str) -> tuple[tuple[str, ...], nn.Cell]:
    """Returns the primitives that support this type, and a graph that runs them."""
    names = tuple(name for name in PAIRS if name != "RealDiv" or kind in FLOATS)
    return names, AllPairs(names, TYPES[kind])


@cache
def flag_graph() -> nn.Cell:
    return AllPairs(("LogicalOr",), ms.bool_)


def drawn(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> tuple[Tensor, np.ndarray]:
    """Draws numbers from a small set, so that some elements are equal.

    Returns the input of the primitive, and the same values for NumPy.
    """
    if kind in INTEGERS:
        numbers = rng.integers(0 if kind == "uint8" else -100, 100, shape).astype(kind)
        return Tensor(numbers), numbers
    tensor = Tensor(rng.integers(-40, 40, shape).astype(np.float32) / 8 + np.float32(0.01)).astype(FLOATS[kind])
    return tensor, floats(tensor)


def floats(tensor: Tensor) -> np.ndarray:
    return tensor.astype(ms.float32).asnumpy()


def rounded(values: np.ndarray, kind: str) -> np.ndarray:
    """Rounds float32 values once to a type. Returns them as float32."""
    return floats(Tensor(np.asarray(values, np.float32)).astype(FLOATS[kind]))


def test_they_are_the_plugins() -> None:
    load_library().IsKernelRegistered.restype = ctypes.c_bool
    for name in (*PAIRS, "LogicalOr", "Cast", "ReduceSum", "ArgMaxWithValue", "Exp", "TopkExt"):
        assert load_library().IsKernelRegistered(name.encode())


@pytest.mark.parametrize("kind", TYPES)
def test_pairs_are_broadcast(kind: str) -> None:
    """Two inputs are broadcast. Half types are computed in float32 and rounded once. Integers wrap around."""
    for seed, shapes in enumerate(SHAPES):
        check_pairs(kind, seed, shapes)


def check_pairs(kind: str, seed: int, shapes: tuple[Any, Any]) -> None:
    rng = np.random.default_rng(seed)
    (a, x), (b, y) = (drawn(rng, shape, kind) for shape in shapes)
    names, graph = graph_of_pairs(kind)
    for name, found in zip(names, graph(a, b), strict=True):
        with np.errstate(divide="ignore", over="ignore"):
            wanted = PAIRS[name](x, y)
        assert tuple(found.shape) == wanted.shape, name
        if wanted.dtype == np.bool_ or kind in INTEGERS:
            np.testing.assert_array_equal(found.asnumpy(), wanted, name)
            assert found.asnumpy().dtype == wanted.dtype, name
        else:
            assert found.dtype == FLOATS[kind], name
            np.testing.assert_array_equal(floats(found).view(np.uint32), rounded(wanted, kind).view(np.uint32), name)


def test_either_of_two_flags() -> None:
    a, b = np.array([[True, False, True]]), np.array([[False], [True]])
    (found,) = flag_graph()(Tensor(a), Tensor(b))
    np.testing.assert_array_equal(found.asnumpy(), a | b)


def test_what_is_no_number_stays_none() -> None:
    a, b = np.array([np.nan, 1, np.inf], np.float32), np.array([2, np.nan, -np.inf], np.float32)
    names, graph = graph_of_pairs("float32")
    found = dict(zip(names, graph(Tensor(a), Tensor(b)), strict=True))
    for name in ("Minimum", "Maximum"):
        np.testing.assert_array_equal(found[name].asnumpy(), PAIRS[name](a, b))


CASTS = {**TYPES, "bool": ms.bool_, "float64": ms.float64, "int16": ms.int16}


@cache
def graph_of_casts(source: str) -> tuple[tuple[str, ...], nn.Cell]:
    """Returns a graph that converts a type to every other type."""
    targets = tuple(target for target in CASTS if target != source)

    class Casts(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.cast, self.kinds = ops.Cast(), tuple(CASTS[target] for target in targets)
            self.set_inputs(Tensor(shape=[None], dtype=CASTS[source]))

        def construct(self, x: Any) -> Any:
            found = ()
            for kind in self.kinds:
                found += (self.cast(x, kind),)
            return found

    return targets, Casts()


def all_casts(source: str, x: Tensor) -> dict[str, Tensor]:
    targets, graph = graph_of_casts(source)
    return dict(zip(targets, graph(x), strict=True))


@pytest.mark.parametrize("source", CASTS)
def test_casts(source: str) -> None:
    """Floats become integers by truncation. Floats become other floats by one rounding to the nearest value.

    Numbers other than zero become true.
    """
    numbers = np.array([0, 1, 2, 3.75, 100.5, 0.0625] + ([] if source.startswith("u") else [-1, -3.75, -7]))
    if source in FLOATS:
        x = Tensor(numbers.astype(np.float32)).astype(FLOATS[source])
        exact = floats(x)
    else:
        exact = numbers.astype(source)
        x = Tensor(exact)
    for target, found in all_casts(source, x).items():
        assert found.dtype == CASTS[target]
        if target in FLOATS:
            np.testing.assert_array_equal(floats(found), rounded(exact.astype(np.float32), target), target)
        elif target == "uint8":
            kept = exact.astype(np.float64) >= 0  # converting negative numbers to uint8 is undefined
            np.testing.assert_array_equal(found.asnumpy()[kept], exact[kept].astype(target))
        else:
            np.testing.assert_array_equal(found.asnumpy(), exact.astype(target), target)


def test_floats_beyond_the_integers() -> None:
    x = np.array([np.nan, 1e30, -1e30, np.inf, -np.inf, 2.0**31, -(2.0**31), 2.0**31 - 128], np.float32)
    most, least = 2**31 - 1, -(2**31)
    found = all_casts("float32", Tensor(x))
    wanted = [0, most, least, most, least, most, least, 2**31 - 128]
    np.testing.assert_array_equal(found["int32"].asnumpy(), wanted)
    np.testing.assert_array_equal(found["int8"].asnumpy(), [0, 127, -128, 127, -128, 127, -128, 127])
    np.testing.assert_array_equal(found["uint8"].asnumpy(), [0, 255, 0, 255, 0, 255, 0, 255])


AXES = ((-1,), (0,), (1,), (0, 2), (0, 1, 2), ())


class Sums(nn.Cell):
    """Sums over several sets of axes, with and without ``keep_dims``."""

    def __init__(self, axes: tuple[tuple[int, ...], ...], kind: Any, rank: int) -> None:
        super().__init__()
        self.axes, self.sums = axes, [ops.ReduceSum(keep_dims=keep) for keep in (True, False)]
        self.set_inputs(Tensor(shape=[None] * rank, dtype=kind))

    def construct(self, x: Any) -> Any:
        found = ()
        for total in self.sums:
            for axes in self.axes:
                found += (total(x, axes),)
        return found


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int32"])
def test_sums(kind: str) -> None:
    """Sums over each set of axes equal NumPy's. A sum without axes adds all elements."""
    x, exact = drawn(np.random.default_rng(0), (5, 7, 3), kind)
    cases = [(keep, axes) for keep in (True, False) for axes in AXES]
    for (keep, axes), found in zip(cases, Sums(AXES, TYPES[kind], 3)(x), strict=True):
        wanted = exact.sum(axes or None, keepdims=keep)
        assert tuple(found.shape) == wanted.shape, (keep, axes)
        if kind in INTEGERS:
            np.testing.assert_array_equal(found.asnumpy(), wanted, str(axes))
        else:
            np.testing.assert_allclose(floats(found), rounded(wanted, kind), rtol=2**-7 if kind == "bfloat16" else 1e-6)


def test_a_sum_is_of_its_own_row_alone() -> None:
    x = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    graph = Sums(((-1,),), ms.float32, 2)
    whole = graph(Tensor(x))[0].asnumpy()
    in_order = np.zeros((300, 1), np.float32)
    for column in x.T:
        in_order += column[:, None]
    np.testing.assert_array_equal(whole, in_order)
    for rows in (slice(0, 1), slice(17, 30), slice(299, 300)):
        np.testing.assert_array_equal(graph(Tensor(x[rows]))[0].asnumpy(), whole[rows])


class Ranks(nn.Cell):
    """Returns the largest element of each row and its index, the 64 largest with their indexes, the exponentials, and
    their sums.
    """

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.largest, self.top_k = ops.ArgMaxWithValue(axis=-1), ops.auto_generate.TopkExt()
        self.exp, self.sum = ops.Exp(), ops.ReduceSum()
        self.set_inputs(Tensor(shape=(None, None), dtype=kind))

    def construct(self, x: Any) -> Any:
        return *self.largest(x), *self.top_k(x, 64, -1, True, True), self.exp(x), self.sum(self.exp(x), -1)


@pytest.mark.parametrize("width", [64, 1000, 1024, 40_001])
@pytest.mark.parametrize("kind", FLOATS)
def test_ranks_and_exponentials_of_logits(kind: str, width: int) -> None:
    """Compares arg-max, the 64 largest elements, and exponentials and their sums with NumPy.

    The lowest index comes first among equal elements. In bfloat16, many elements are equal.
    """
    rng = np.random.default_rng(width)
    given = Tensor(rng.standard_normal((5, width)).astype(np.float32) * 4, FLOATS[kind])
    x = given.astype(ms.float32).asnumpy()
    index, value, values, ids, exps, sums = Ranks(FLOATS[kind])(given)
    np.testing.assert_array_equal(index.asnumpy(), x.argmax(1))
    np.testing.assert_array_equal(value.astype(ms.float32).asnumpy(), x.max(1))
    order = np.lexsort((np.broadcast_to(np.arange(width), x.shape), -x), axis=1)[:, :64]
    np.testing.assert_array_equal(ids.asnumpy(), order)
    np.testing.assert_array_equal(values.astype(ms.float32).asnumpy(), np.take_along_axis(x, order, 1))
    exact = np.exp(x.astype(np.float64))
    spacing = {"float32": 1e-6, "float16": 2**-11, "bfloat16": 2**-8}[kind]
    finite = exact < 65504  # 65504 is the largest float16
    np.testing.assert_allclose(exps.astype(ms.float32).asnumpy()[finite], exact[finite], rtol=spacing, atol=1e-7)
    if kind == "float32":
        np.testing.assert_allclose(sums.asnumpy(), exact.sum(1), rtol=1e-6 if width >= 128 else 4e-6)


def test_the_largest_is_nan_or_the_first() -> None:
    rows = [[np.nan, 1, 3, 3], [np.nan] * 4, [-np.inf, -np.inf, -5, np.nan], [-0.0, 0.0, -1, 0.0], [-np.inf] * 4]
    for kind in FLOATS.values():
        index, value = ops.ArgMaxWithValue(axis=-1)(Tensor(np.array(rows, np.float32), kind))
        assert index.asnumpy().tolist() == [0, 0, 3, 0, 0]
        assert np.isnan(value.astype(ms.float32).asnumpy()).tolist() == [True, True, True, False, False]


def test_the_first_of_equal_elements_far_apart_is_found() -> None:
    """The kernel for 16-bit types searches a row in chunks of 512 elements."""
    rows = np.full((5, 1300), -2, np.float32)
    wanted = [511, 512, 700, 1299, 1030]
    for row, place in enumerate(wanted):
        rows[row, place:] = 1
    rows[4, 1030] = np.nan
    for kind in FLOATS.values():
        index, _ = ops.ArgMaxWithValue(axis=-1)(Tensor(rows, kind))
        assert index.asnumpy().tolist() == wanted


class Same(nn.Cell):
    """Takes the place of the gather of all agents. Its input has the values of all agents already."""

    def construct(self, x: Any) -> Any:
        return x


class BestOfThree(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        part: Any = SimpleNamespace(parallel=SimpleNamespace(tensor_parallel=3), vocab_stride=10)
        with mock.patch.object(cells, "all_gather", return_value=Same()):
            self.choose = cells._BestOfAgents(part)

    def construct(self, ids: Any, values: Any) -> Any:
        return self.choose(ids, values)


@pytest.mark.parametrize("kind", FLOATS)
def test_the_best_of_agents_shows_the_nan_of_any_agent(kind: str) -> None:
    """If one agent's logits have a NaN or an infinity, the best logit is this value. Other sequences keep their tokens.

    An agent whose logits are all -infinity does not spoil the tokens of other agents.
    """
    graph, ids = BestOfThree(), Tensor(np.arange(6, dtype=np.int32))
    for bad in (np.nan, np.inf, -np.inf):
        for agent in range(3):
            values = np.array([[1, 2], [5, 1], [3, 4]], np.float32)
            values[agent, 0] = bad
            chosen, best = graph(ids, Tensor(values.reshape(-1), FLOATS[kind]))
            wanted = int(values[:, 0].argmax())  # NumPy takes a NaN as the largest, too
            assert chosen.asnumpy().tolist() == [12 * wanted, 25]
            np.testing.assert_array_equal(best.astype(ms.float32).asnumpy(), [values[wanted, 0], 4])
