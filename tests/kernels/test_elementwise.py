"""Compares RmsNorm, AddRmsNorm, Swiglu, SiLU and the rotary embedding with float64."""

from __future__ import annotations

import numpy as np
import pytest

from performance.kernels.calls import DTYPES, Array, load, rms_norm, rotary, silu, store, swiglu
from performance.kernels.library import set_threads
from support.kernel_calls import EPSILON, random_tensor
from support.kernel_threads import threads_as_before


def assert_rounded(stored: Array, exact: Array, dtype: str, slack: float = 1e-6) -> None:
    """Checks that ``stored`` is ``exact`` rounded once.

    ``slack`` is the relative error allowed for float32 arithmetic.
    """
    smallest = {"float32": 1e-38, "float16": 2.0**-25, "bfloat16": 1e-38}[dtype]
    error = np.abs(load(stored, dtype) - exact)
    assert (error <= (EPSILON[dtype] + slack) * np.abs(exact) * 1.001 + smallest).all(), error.max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gamma_dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 15), (4, 64), (2, 1000), (70, 513)])
def test_rms_norm_equals_float64(dtype: str, gamma_dtype: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    x, gamma = random_tensor(rng, shape, dtype), random_tensor(rng, shape[1:], gamma_dtype)
    rstd = 1 / np.sqrt((load(x, dtype) ** 2).mean(1) + 1e-5)
    exact = load(x, dtype) * rstd[:, None] * load(gamma, gamma_dtype)
    result = rms_norm(x, gamma, dtype, gamma_dtype)
    np.testing.assert_allclose(result.rstd, rstd, rtol=1e-6)
    assert_rounded(result.y, exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 6), (5, 64), (3, 250)])
def test_add_rms_norm_norms_the_sum_as_it_is_stored(dtype: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(2)
    x, residual = random_tensor(rng, shape, dtype), random_tensor(rng, shape, dtype)
    gamma = random_tensor(rng, shape[1:], dtype)
    total = store((load(x, dtype) + load(residual, dtype)).astype(np.float32), dtype)
    rstd = 1 / np.sqrt((load(total, dtype) ** 2).mean(1, keepdims=True) + 1e-5)
    result = rms_norm(x, gamma, dtype, dtype, residual)
    np.testing.assert_array_equal(result.sum, total)
    assert_rounded(result.y, load(total, dtype) * rstd * load(gamma, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 30), (5, 128), (2, 20002)])
def test_swiglu_equals_float64(dtype: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    x = store(rng.standard_normal(shape).astype(np.float32) * 4, dtype)
    gate, value = np.split(load(x, dtype), 2, 1)
    assert_rounded(swiglu(x, dtype), gate / (1 + np.exp(-gate)) * value, dtype)


def test_swiglu_of_extreme_gates() -> None:
    gates = np.array([-1e30, -200, -88, 0, 88, 200, 1e30, np.nan], np.float32)
    out = swiglu(np.concatenate([gates, np.ones(8, np.float32)])[None], "float32")[0]
    np.testing.assert_allclose(out[3:7], gates[3:7], rtol=1e-6)
    assert (np.abs(out[:3]) < 1e-6).all()
    assert np.isnan(out[7])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 15, 64, 40_003])
def test_silu_equals_float64(dtype: str, count: int) -> None:
    x = store(np.random.default_rng(4).standard_normal(count).astype(np.float32) * 4, dtype)
    exact = load(x, dtype)
    assert_rounded(silu(x, dtype), exact / (1 + np.exp(-exact)), dtype)
    whole = silu(x, dtype)
    for start in {0, count // 3, count - 1}:
        np.testing.assert_array_equal(silu(x[start : start + 21].copy(), dtype), whole[start : start + 21])


def test_silu_of_extreme_values() -> None:
    values = np.array([-1e30, -200, -88, 0, 88, 200, 1e30, np.nan], np.float32)
    out = silu(values, "float32")
    np.testing.assert_allclose(out[3:7], values[3:7], rtol=1e-6)
    assert (np.abs(out[:3]) < 1e-6).all()
    assert np.isnan(out[7])


def tables(positions: int, dim: int, *, interleaved: bool = False) -> tuple[Array, Array]:
    angles = np.arange(positions)[:, None] / 10000.0 ** (np.arange(0, dim, 2) / dim)
    angles = np.repeat(angles, 2, 1) if interleaved else np.concatenate([angles, angles], 1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotated(x: Array, cos: Array, sin: Array, *, interleaved: bool = False) -> Array:
    """Applies the rotary embedding to x [tokens, heads, dim], in the precision of the arguments."""
    other = np.empty_like(x)
    if interleaved:
        other[..., ::2], other[..., 1::2] = -x[..., 1::2], x[..., ::2]
    else:
        half = x.shape[-1] // 2
        other[..., :half], other[..., half:] = -x[..., half:], x[..., :half]
    return x * cos[:, None] + other * sin[:, None]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dtype", "table_dtype"), [(d, t) for d in DTYPES for t in ("float32", d)])
@pytest.mark.parametrize("shape", [(1, 1, 2), (5, 3, 16), (3, 2, 38), (9, 4, 128)])
def test_rotary_equals_float64(dtype: str, table_dtype: str, shape: tuple[int, int, int], interleaved: bool) -> None:
    rng = np.random.default_rng(4)
    cos, sin = (store(table, table_dtype) for table in tables(50, shape[2], interleaved=interleaved))
    positions = rng.integers(0, 50, shape[0]).astype(np.int32)
    x = random_tensor(rng, shape, dtype)
    picked = load(cos, table_dtype)[positions], load(sin, table_dtype)[positions]
    exact = rotated(load(x, dtype), *picked, interleaved=interleaved)
    out = rotary(x, cos, sin, positions, (dtype, table_dtype), interleaved=interleaved)
    limit = EPSILON[dtype] * np.abs(exact) * 1.001 + 2e-6
    assert (np.abs(load(out, dtype) - exact) <= limit).all()
    gathered = rotary(x, cos[positions], sin[positions], None, (dtype, table_dtype), interleaved=interleaved)
    straight = rotary(x, cos, sin, positions, (dtype, table_dtype), interleaved=interleaved)
    np.testing.assert_array_equal(gathered, straight)


def test_rotary_in_float32_is_the_plain_expression_bit_for_bit() -> None:
    rng = np.random.default_rng(5)
    cos, sin = tables(20, 64)
    x, positions = random_tensor(rng, (7, 3, 64), "float32"), rng.integers(0, 20, 7).astype(np.int32)
    out = rotary(x, cos, sin, positions, ("float32", "float32"))
    np.testing.assert_array_equal(out, rotated(x, cos[positions], sin[positions]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_threads_change_no_bit(dtype: str) -> None:
    rng = np.random.default_rng(7)
    x, gamma = random_tensor(rng, (300, 514), dtype), random_tensor(rng, (514,), dtype)
    with threads_as_before():
        set_threads(2)
        normed, gated = rms_norm(x, gamma, dtype, dtype).y, swiglu(x, dtype)
        set_threads(1)
        for row in (0, 17, 299):
            np.testing.assert_array_equal(rms_norm(x[row : row + 1].copy(), gamma, dtype, dtype).y[0], normed[row])
            np.testing.assert_array_equal(swiglu(x[row : row + 1].copy(), dtype)[0], gated[row])
