"""Tests int8 layers with static quantisation of their inputs.

The bits must equal those of the scheme's integer arithmetic in NumPy, on every instruction set.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agent.kernels.library import KernelError
from agent.kernels.packing import StaticInputs, pack_weight, packed_weight_bytes, weight_blob
from performance.kernels.calls import load, store
from performance.kernels.linear_calls import linear, linear_best, packed
from support.time_limits import time_limit

ROOT = Path(__file__).resolve().parents[2]


def made(columns: int, depth: int, rows: int, dtype: str, *, bias: bool = False, gated: bool = False):
    rng = np.random.default_rng(columns * depth + rows)
    x = store(rng.standard_normal((rows, depth)) * 3, dtype)
    x[0, 0] = store(np.array([6e4], np.float32), dtype)[0]  # this input lies far outside of the calibrated range
    values = rng.integers(-128, 128, (columns, depth)).astype(np.int8)
    scales = rng.uniform(1e-4, 1e-3, (columns, 1)).astype(np.float32)
    inputs = StaticInputs(
        rng.uniform(20, 40, depth).astype(np.float32),
        rng.integers(-60, 60, depth).astype(np.float32),
        rng.integers(-(1 << 22), 1 << 22, columns).astype(np.int32),
    )
    added = rng.standard_normal(columns).astype(np.float32) if bias else None
    blob = packed("int8", values, gated=gated, scales=scales, static_inputs=inputs, bias=added)
    return x, blob, expected(load(x, dtype), values, scales, inputs, added)


def expected(x: np.ndarray, values: np.ndarray, scales: np.ndarray, inputs: StaticInputs, bias: np.ndarray | None):
    """Returns (q * weight summed over the depth + sum offset) * scale, plus the bias if it is given.

    The quantised input is q = round(x * inverse + offset), within -128 to 127.
    """
    x = x.astype(np.float32)  # products and sums below are rounded to float32, as in the kernel
    q = np.clip(np.rint(x * inputs.inverses + inputs.offsets), -128, 127).astype(np.int64)
    out = (q @ values.T.astype(np.int64) + inputs.sum_offsets).astype(np.float32) * scales[:, 0]
    return out if bias is None else out + bias


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("mode", ["kernel", "quantized", "reference"])
@pytest.mark.parametrize(("columns", "depth", "rows"), [(1, 8, 1), (63, 72, 3), (130, 200, 17), (64, 512, 40)])
def test_the_bits_are_those_of_the_scheme(dtype: str, mode: str, columns: int, depth: int, rows: int) -> None:
    for bias in (False, True):
        x, blob, wanted = made(columns, depth, rows, dtype, bias=bias)
        np.testing.assert_array_equal(linear(x, blob, dtype, epilogue="store_float", mode=mode), wanted)
        np.testing.assert_array_equal(linear(x, blob, dtype, mode=mode), store(wanted, dtype))


def test_a_gated_weight_keeps_the_order_of_its_columns() -> None:
    x, blob, wanted = made(140, 72, 9, "float32", gated=True)
    gate, up = np.split(wanted, 2, axis=1)
    with np.errstate(over="ignore"):
        exact = gate / (1 + np.exp(-gate.astype(np.float64))) * up
    np.testing.assert_allclose(linear(x, blob, "float32", epilogue="swiglu"), exact, rtol=2e-6, atol=2e-6)


def test_the_largest_is_that_with_sum_offsets() -> None:
    x, blob, wanted = made(130, 72, 5, "float32")
    values, ids, best = linear_best(x, blob, "float32")
    np.testing.assert_array_equal(values, wanted)
    np.testing.assert_array_equal(ids, wanted.argmax(1))
    np.testing.assert_array_equal(best, wanted.max(1))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_nan_and_changes_no_other(value: float) -> None:
    x, blob, wanted = made(64, 72, 6, "float32")
    x[2, 70] = value
    found = linear(x, blob, "float32")
    assert np.isnan(found[2]).all()
    np.testing.assert_array_equal(np.delete(found, 2, 0), np.delete(wanted, 2, 0))


def digest() -> str:
    """Returns a digest of products of all types. The caller compares the digests of different instruction sets."""
    found = hashlib.sha256()
    for dtype in ("float32", "float16", "bfloat16"):
        for columns, depth, rows in ((63, 72, 3), (130, 200, 33)):
            x, blob, _ = made(columns, depth, rows, dtype)
            found.update(linear(x, blob, dtype, epilogue="store_float").tobytes())
    return found.hexdigest()


def run_under(isa: str, code: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/kernels")))
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=time_limit(60), check=False,
        env={**os.environ, "LLM_KERNELS_ISA": isa, "PYTHONPATH": path},
    )  # fmt: skip


@pytest.mark.parametrize(
    "isa", ["portable", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx"]
)
def test_every_instruction_set_gives_the_same_bits(isa: str) -> None:
    process = run_under(isa, "import test_static_inputs; print(test_static_inputs.digest())")
    if process.returncode == 2 and f'LLM_KERNELS_ISA is "{isa}"' in process.stderr:
        pytest.skip(f"this processor or compiler has no {isa}")
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == digest()


def test_only_integers_of_8_bits_without_groups_have_static_inputs() -> None:
    numbers = StaticInputs(np.ones(64, np.float32), np.zeros(64, np.float32), np.zeros(64, np.int32))
    for fmt, group in (("int8", 32), ("int8_weight_only", 0), ("int4", 64), ("bfloat16", 0)):
        with pytest.raises(ValueError, match="and static inputs"):
            packed_weight_bytes(fmt, 64, 64, group, static_inputs=True)
    codes, scales = np.ones((64, 64), np.int8), np.ones((64, 1), np.float32)
    with pytest.raises(KernelError):
        pack_weight("int8_weight_only", codes, weight_blob(1 << 20), scales=scales, static_inputs=numbers)
    with pytest.raises(KernelError):
        pack_weight("int8", codes.astype(np.float32), weight_blob(1 << 20), static_inputs=numbers)
    with pytest.raises(ValueError, match=r"inverses is float32 \(64,\).* float32 \(72,\)"):
        pack_weight("int8", np.ones((64, 72), np.int8), weight_blob(1 << 20), scales=scales, static_inputs=numbers)
    short = packed_weight_bytes("int8", 64, 64)
    with pytest.raises(KernelError):
        pack_weight("int8", codes, weight_blob(short), scales=scales, static_inputs=numbers)
