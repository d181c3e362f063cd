"""Compares the activations of gated linear layers with NumPy in float64.

The program test_library.py runs these tests again for every instruction set.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from agent.kernels.packing import GATES, Blob, StaticInputs
from performance.kernels.calls import DTYPES, load, store, swiglu
from performance.kernels.linear_calls import header, linear, packed
from support.kernel_calls import EPSILON

Float64Array = npt.NDArray[np.float64]


def sigmoid(x: Float64Array) -> Float64Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def gelu(x: Float64Array) -> Float64Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def clamped(gate: Float64Array, up: Float64Array) -> Float64Array:
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return np.asarray(gate * sigmoid(1.702 * gate) * (up + 1))


EXACT: dict[str, Callable[[Float64Array, Float64Array], Float64Array]] = {
    "silu": lambda gate, up: np.asarray(gate * sigmoid(gate) * up),
    "gelu_tanh": lambda gate, up: np.asarray(gelu(gate) * up),
    "clamped_silu": clamped,
}
INNER = 70


def test_every_activation_has_a_definition() -> None:
    assert EXACT.keys() == GATES.keys()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", GATES)
def test_equals_float64(activation: str, dtype: str) -> None:
    """The weight picks input 0 as every gate and input 1 as every up value, so products are exact."""
    rng = np.random.default_rng(3)
    x = store(np.float32(rng.uniform(-1, 1, (90, 2)) * np.geomspace(1e-3, 30, 90)[:, None]), dtype)
    weight = np.zeros((2 * INNER, 2), np.float32)
    weight[:INNER, 0] = weight[INNER:, 1] = 1
    blob = packed(dtype, store(weight, dtype), gated=True, activation=activation, source_dtype=dtype)
    assert header(blob)["gated"] == GATES[activation]
    inputs = load(x, dtype).astype(np.float64)
    exact = EXACT[activation](inputs[:, :1], inputs[:, 1:])
    for mode in ("kernel", "reference"):
        out = load(linear(x, blob, dtype, epilogue="swiglu", mode=mode), dtype)
        assert out.shape == (90, INNER)
        assert (
            np.abs(out - exact) <= 1.001 * EPSILON[dtype] * np.abs(exact) + 3e-6 * (1 + np.abs(inputs[:, 1:]))
        ).all()


@pytest.mark.parametrize("activation", GATES)
def test_a_nan_stays_a_nan(activation: str) -> None:
    x = np.array([[np.nan, 1], [1, np.nan]], np.float32)
    weight = np.zeros((2, 2), np.float32)
    weight[0, 0] = weight[1, 1] = 1
    blob = packed("float32", weight, gated=True, activation=activation)
    for row in range(2):
        values = np.nan_to_num(x[row : row + 1], nan=0.0)
        assert np.isfinite(linear(values, blob, "float32", epilogue="swiglu")).all()
    assert np.isnan(linear(x, blob, "float32", epilogue="swiglu")).all()


FORMATS = ("float", "int8", "int8 static", "int8_weight_only", "int4", "int4_weight_only")


def gated_blob(form: str, dtype: str, rng: np.random.Generator) -> Blob:
    """Packs a weight of 40 gate and 40 up columns. int4 has groups of 32 with zero points."""
    values = rng.standard_normal((80, 256)).astype(np.float32)
    if form == "float":
        return packed(dtype, store(values, dtype), gated=True, source_dtype=dtype)
    if form != "int8 static":
        is_int4 = form.startswith("int4")
        return packed(form, values, group=32 if is_int4 else 0, gated=True, asymmetric=is_int4)
    inputs = StaticInputs(
        rng.uniform(10, 40, 256).astype(np.float32), rng.integers(-30, 30, 256).astype(np.float32),
        rng.integers(-9000, 9000, 80).astype(np.int32),
    )  # fmt: skip
    integers, scales = rng.integers(-127, 128, (80, 256)).astype(np.int8), rng.uniform(1e-4, 1e-3, (80, 1))
    return packed("int8", integers, gated=True, scales=scales.astype(np.float32), static_inputs=inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_rounded_gate_and_up_give_the_bits_of_a_product_and_swiglu(form: str, dtype: str) -> None:
    rng = np.random.default_rng(11)
    blob = gated_blob(form, dtype, rng)
    for rows in (1, 5, 17, 70):
        x = store(rng.standard_normal((rows, 256)).astype(np.float32), dtype)
        wanted = swiglu(linear(x, blob, dtype), dtype)
        np.testing.assert_array_equal(linear(x, blob, dtype, epilogue="swiglu_rounded"), wanted)
        unrounded = linear(x, blob, dtype, epilogue="swiglu")
        assert np.array_equal(unrounded, wanted) == (dtype == "float32"), "the test needs values that are rounded"
