"""Packs weights and runs the kernel of linear layers, or its scalar reference."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.kernels.library import KernelError, structure
from agent.kernels.packing import Blob, pack_weight, packed_weight_bytes, weight_blob
from performance.kernels.calls import DTYPES, Array
from performance.kernels.library import load_testing_library

EPILOGUES = ("store", "store_float", "swiglu", "swiglu_rounded")
"""Names of the values of llmk::Epilogue, in the order of their numbers."""
MODES = {"kernel": 0, "quantized": 1, "reference": 2}
"""``kernel``: the kernel quantizes the rows. ``quantized``: the rows are quantized before the kernel runs, as fused
operators do. ``reference``: the scalar reference runs instead of the kernel.
"""


LinearArgs = structure(
    "LinearArgs",
    "pointer: weight x quantized; int32: dtype; int64: rows x_stride out_stride; pointer: out; int32: epilogue;"
    "pointer: best_ids best_values lora",
)
"""A ctypes class with the members of llmk::LinearArgs in ops/linear.h."""


def packed(fmt: str, values: Array, *, group: int = 0, gated: bool = False, **options: Any) -> Blob:
    """Packs ``values`` [columns, depth] into a new blob. ``options`` are passed to ``pack_weight``."""
    biased = options.get("bias") is not None
    static = options.get("static_inputs") is not None
    size = packed_weight_bytes(fmt, values.shape[0], values.shape[1], group, biased=biased, static_inputs=static)
    blob = weight_blob(size)
    pack_weight(fmt, values, blob, group=group, gated=gated, **options)
    return blob


def header(blob: Blob) -> dict[str, int]:
    """Returns fields of a blob's header by name: format (a number), gated, columns, depth and group."""
    small, large = blob[:16].view(np.int32), blob[16:40].view(np.int64)
    return {
        "format": int(small[1]), "gated": int(small[3]), "columns": int(large[0]), "depth": int(large[1]),
        "group": int(large[2]),
    }  # fmt: skip


def linear(
    x: Array, blob: Blob, dtype: str, *, epilogue: str = "store", mode: str = "kernel", out: Array | None = None
) -> Array:
    """Multiplies ``x`` [rows, depth] by a packed weight. Returns [rows, columns], or [rows, columns / 2] for the
    epilogues ``swiglu`` and ``swiglu_rounded``.

    ``x`` and ``out`` may be slices of wider arrays. Raises KernelError if the kernel refuses its arguments.
    """
    result, _, _ = _call(x, blob, dtype, epilogue, mode, out, best=False)
    return result


def linear_best(
    x: Array, blob: Blob, dtype: str, *, mode: str = "kernel"
) -> tuple[Array, npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Multiplies ``x`` [rows, depth] by a packed weight, and finds the best column of each row.

    Returns the float products [rows, columns], the column of each row's largest product, and this product.
    """
    return _call(x, blob, dtype, "store_float", mode, None, best=True)


def _call(
    x: Array, blob: Blob, dtype: str, epilogue: str, mode: str, out: Array | None, *, best: bool
) -> tuple[Array, npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    rows, columns = x.shape[0], header(blob)["columns"]
    width = columns // 2 if epilogue.startswith("swiglu") else columns
    if out is None:
        out = np.full((rows, width), 77, np.float32 if epilogue == "store_float" else x.dtype)
    assert x.strides[1] == x.itemsize
    assert out.strides[1] == out.itemsize
    ids, values = np.full(rows, -7, np.int32), np.full(rows, np.nan, np.float32)
    args = LinearArgs(
        weight=blob.ctypes.data, x=x.ctypes.data, dtype=DTYPES.index(dtype), rows=rows,
        x_stride=x.strides[0] // x.itemsize, out_stride=out.strides[0] // out.itemsize, out=out.ctypes.data,
        epilogue=EPILOGUES.index(epilogue), best_ids=ids.ctypes.data if best else None,
        best_values=values.ctypes.data if best else None,
    )  # fmt: skip
    function = load_testing_library().llmk_test_linear
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    if function(ctypes.byref(args), blob.size, MODES[mode]) != 0:
        raise KernelError(f"the kernel refused a weight of format {header(blob)['format']}; see standard error")
    return out, ids, values
