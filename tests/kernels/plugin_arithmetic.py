"""Run by test_plugin_semantics.py under pytest in a process of its own, which has the op plugin: what graphs compute
between the inference primitives, against NumPy, through graphs of dynamic shapes."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

from agent.kernels.library import library_path, load_library

os.environ["MS_OP_PLUGIN_PATH"] = str(library_path())

import mindspore as ms
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mindspore import Tensor, nn, ops

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
examples = settings(
    max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
seeds = st.integers(0, 2**32 - 1)


@cache
def pair_graph(name: str) -> nn.Cell:
    class Pair(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.primitive = getattr(ops, name)()

        def construct(self, a: Any, b: Any) -> Any:
            return self.primitive(a, b)

    return Pair()


def drawn(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> tuple[Tensor, np.ndarray]:
    """As the primitive gets them, few values so that some are equal; and what is computed with."""
    if kind in INTEGERS:
        numbers = rng.integers(0 if kind == "uint8" else -100, 100, shape).astype(kind)
        return Tensor(numbers), numbers
    tensor = Tensor(rng.integers(-40, 40, shape).astype(np.float32) / 8 + np.float32(0.01)).astype(FLOATS[kind])
    return tensor, floats(tensor)


def floats(tensor: Tensor) -> np.ndarray:
    return tensor.astype(ms.float32).asnumpy()


def rounded(values: np.ndarray, kind: str) -> np.ndarray:
    """Float32 rounded once to a type, as float32."""
    return floats(Tensor(np.asarray(values, np.float32)).astype(FLOATS[kind]))


def test_they_are_the_plugins() -> None:
    load_library().IsKernelRegistered.restype = ctypes.c_bool
    for name in (*PAIRS, "LogicalOr", "Cast", "ReduceSum"):
        assert load_library().IsKernelRegistered(name.encode())


@pytest.mark.parametrize("name", PAIRS)
@examples
@given(seeds, st.sampled_from(SHAPES), st.sampled_from(sorted(TYPES)))
def test_pairs_are_broadcast(name: str, seed: int, shapes: tuple[Any, Any], kind: str) -> None:
    """Halves in float32, rounded once; integers wrap around."""
    if name == "RealDiv" and kind in INTEGERS:
        return
    rng = np.random.default_rng(seed)
    (a, x), (b, y) = (drawn(rng, shape, kind) for shape in shapes)
    with np.errstate(divide="ignore", over="ignore"):
        wanted = PAIRS[name](x, y)
    found = pair_graph(name)(a, b)
    assert tuple(found.shape) == wanted.shape
    if wanted.dtype == np.bool_ or kind in INTEGERS:
        np.testing.assert_array_equal(found.asnumpy(), wanted)
        assert found.asnumpy().dtype == wanted.dtype
    else:
        assert found.dtype == FLOATS[kind]
        np.testing.assert_array_equal(floats(found).view(np.uint32), rounded(wanted, kind).view(np.uint32))


def test_either_of_two_flags() -> None:
    a, b = np.array([[True, False, True]]), np.array([[False], [True]])
    np.testing.assert_array_equal(pair_graph("LogicalOr")(Tensor(a), Tensor(b)).asnumpy(), a | b)


@pytest.mark.parametrize("name", ["Minimum", "Maximum"])
def test_what_is_no_number_stays_none(name: str) -> None:
    a, b = np.array([np.nan, 1, np.inf], np.float32), np.array([2, np.nan, -np.inf], np.float32)
    np.testing.assert_array_equal(pair_graph(name)(Tensor(a), Tensor(b)).asnumpy(), PAIRS[name](a, b))


@cache
def cast_graph(kind: str) -> nn.Cell:
    class Cast(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.cast, self.kind = ops.Cast(), CASTS[kind]

        def construct(self, x: Any) -> Any:
            return self.cast(x, self.kind)

    return Cast()


CASTS = {**TYPES, "bool": ms.bool_, "float64": ms.float64, "int16": ms.int16}


@pytest.mark.parametrize("source", CASTS)
@pytest.mark.parametrize("target", CASTS)
def test_casts(source: str, target: str) -> None:
    """Towards zero from floats to integers; once to nearest between floats; not zero is true."""
    if source == target:
        return
    numbers = np.array([0, 1, 2, 3.75, 100.5, 0.0625] + ([] if source.startswith("u") else [-1, -3.75, -7]))
    if source in FLOATS:
        x = Tensor(numbers.astype(np.float32)).astype(FLOATS[source])
        exact = floats(x)
    else:
        exact = numbers.astype(source)
        x = Tensor(exact)
    found = cast_graph(target)(x)
    assert found.dtype == CASTS[target]
    if target in FLOATS:
        np.testing.assert_array_equal(floats(found), rounded(exact.astype(np.float32), target))
    elif target == "uint8":
        kept = exact.astype(np.float64) >= 0  # what a negative number becomes is another matter
        np.testing.assert_array_equal(found.asnumpy()[kept], exact[kept].astype(target))
    else:
        np.testing.assert_array_equal(found.asnumpy(), exact.astype(target))


def test_floats_beyond_the_integers() -> None:
    x = np.array([np.nan, 1e30, -1e30, np.inf, -np.inf, 2.0**31, -(2.0**31), 2.0**31 - 128], np.float32)
    most, least = 2**31 - 1, -(2**31)
    wanted = [0, most, least, most, least, most, least, 2**31 - 128]
    np.testing.assert_array_equal(cast_graph("int32")(Tensor(x)).asnumpy(), wanted)
    wanted = [0, 127, -128, 127, -128, 127, -128, 127]
    np.testing.assert_array_equal(cast_graph("int8")(Tensor(x)).asnumpy(), wanted)
    np.testing.assert_array_equal(cast_graph("uint8")(Tensor(x)).asnumpy(), [0, 255, 0, 255, 0, 255, 0, 255])


@cache
def sum_graph(axes: tuple[int, ...], keep: bool) -> nn.Cell:
    class Sum(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.sum, self.axes = ops.ReduceSum(keep_dims=keep), axes

        def construct(self, x: Any) -> Any:
            return self.sum(x, self.axes)

    return Sum()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("axes", [(-1,), (0,), (1,), (0, 2), (0, 1, 2), ()])
def test_sums(axes: tuple[int, ...], keep: bool, kind: str) -> None:
    """In the order of the elements; without axes over all."""
    x, exact = drawn(np.random.default_rng(0), (5, 7, 3), kind)
    found = sum_graph(axes, keep)(x)
    wanted = exact.sum(axes or None, keepdims=keep)
    assert tuple(found.shape) == wanted.shape
    if kind in INTEGERS:
        np.testing.assert_array_equal(found.asnumpy(), wanted)
    else:
        np.testing.assert_allclose(floats(found), rounded(wanted, kind), rtol=2**-7 if kind == "bfloat16" else 1e-6)


def test_a_sum_is_of_its_own_row_alone() -> None:
    x = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    graph = sum_graph((-1,), True)
    whole = graph(Tensor(x)).asnumpy()
    in_order = np.zeros((300, 1), np.float32)
    for column in x.T:
        in_order += column[:, None]
    np.testing.assert_array_equal(whole, in_order)
    for rows in (slice(0, 1), slice(17, 30), slice(299, 300)):
        np.testing.assert_array_equal(graph(Tensor(x[rows])).asnumpy(), whole[rows])
