"""Tests the bias of a packed linear layer. It is added to the finished product, before the epilogue.

This holds for every weight format and every epilogue.
"""

from __future__ import annotations

import numpy as np
import pytest

from agent.kernels.library import KernelError
from agent.kernels.packing import packed_weight_bytes
from performance.kernels.calls import load, store
from performance.kernels.linear_calls import linear, linear_best, packed

FORMATS = [
    ("float32", "float32", 0), ("float16", "float16", 0), ("bfloat16", "bfloat16", 0),
    ("int8", "bfloat16", 0), ("int8", "float32", 32), ("int8_weight_only", "float16", 0), ("int4", "float32", 32),
]  # fmt: skip
"""Type of the weight, type of the activations, and group size."""
DEPTH = 72


def made(fmt: str, dtype: str, group: int, columns: int, *, biased: bool = True, gated: bool = False):
    rng = np.random.default_rng(columns)
    source = fmt if fmt in ("float16", "bfloat16") else "float32"
    values = store(rng.standard_normal((columns, DEPTH)) / 8, source)
    bias = rng.standard_normal(columns).astype(np.float32)
    options = {"bias": bias} if biased else {}
    blob = packed(fmt, values, group=group, gated=gated, source_dtype=source, **options)
    return store(rng.standard_normal((9, DEPTH)), dtype), blob, bias


@pytest.mark.parametrize(("fmt", "dtype", "group"), FORMATS)
@pytest.mark.parametrize("columns", [1, 63, 64, 130])
def test_is_added_last_and_in_float32(fmt: str, dtype: str, group: int, columns: int) -> None:
    x, blob, bias = made(fmt, dtype, group, columns)
    _, plain, _ = made(fmt, dtype, group, columns, biased=False)
    exact = linear(x, plain, dtype, epilogue="store_float") + bias
    np.testing.assert_array_equal(linear(x, blob, dtype, epilogue="store_float"), exact)
    np.testing.assert_array_equal(linear(x, blob, dtype), store(exact, dtype))


@pytest.mark.parametrize(("fmt", "dtype", "group"), FORMATS)
@pytest.mark.parametrize("columns", [2, 64, 140])
def test_the_reference_agrees_also_on_a_gated_weight(fmt: str, dtype: str, group: int, columns: int) -> None:
    x, blob, _ = made(fmt, dtype, group, columns, gated=True)
    ours, wanted = (load(linear(x, blob, dtype, epilogue="swiglu", mode=m), dtype) for m in ("kernel", "reference"))
    tolerance = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(ours, wanted, rtol=tolerance, atol=tolerance)


def test_the_largest_is_that_with_bias() -> None:
    x, blob, _ = made("float32", "float32", 0, 130)
    values, ids, best = linear_best(x, blob, "float32")
    np.testing.assert_array_equal(ids, values.argmax(1))
    np.testing.assert_array_equal(best, values.max(1))


def test_a_blob_without_room_for_its_bias_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    x, blob, _ = made("bfloat16", "bfloat16", 0, 130)
    assert packed_weight_bytes("bfloat16", 130, DEPTH, biased=True) == blob.size
    with pytest.raises(KernelError):
        linear(x, blob[:-4], "bfloat16")
    assert "its header asks for" in capfd.readouterr().err


def test_a_bias_of_another_length_is_refused() -> None:
    values = np.zeros((4, DEPTH), np.float32)
    with pytest.raises(ValueError, match=r"bias is float32 \(3,\)"):
        packed("float32", values, bias=np.zeros(3, np.float32))
