"""Packs weights for the linear kernels. ops/linear.h describes the layout and the arithmetic."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.kernels.library import KernelError, load_library, structure
from llm_serving.model.number_formats import weight_format

Array = npt.NDArray[Any]
Blob = npt.NDArray[np.uint8]

_SOURCE_DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
GATES = {"silu": 1, "gelu_tanh": 2, "clamped_silu": 3}
"""The activations of gated weights. Maps the name of each activation to its number in llmk::Gate (ops/gated.h)."""
_HUGE_PAGE = 2 << 20
"""Size of a huge page of memory, in bytes."""
_PackSource = structure(
    "PackSource",
    "int32: format source_dtype gate; int64: columns depth group; bool: asymmetric; pointer: values scales zeros bias"
    " input_inverses input_offsets sum_offsets",
)
"""A ctypes class with the members of llmk::PackSource in ops/linear.h."""


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """Scales and offsets for the inputs of an int8 layer, from a calibration. An int8 layer without static inputs
    computes a scale for each token instead.

    An input x becomes q = round(x * inverse + offset), within -128 to 127. The output of a column is (sum of q * weight
    + sum offset) * scale.
    """

    inverses: npt.NDArray[np.float32]
    """The factor of each input [in]: 1 / scale."""
    offsets: npt.NDArray[np.float32]
    """The offset of each input [in], added after the multiplication."""
    sum_offsets: npt.NDArray[np.int32]
    """An integer for each output column [out], which is added to the column's sum. It removes the part of the sum that
    comes from the offsets of the inputs. It can also include the layer's bias.
    """


def packed_weight_bytes(
    fmt: str, columns: int, depth: int, group: int = 0, *, biased: bool = False, static_inputs: bool = False
) -> int:
    """Returns the size in bytes of the blob of a weight with ``columns`` outputs and ``depth`` inputs.

    ``group`` is the number of inputs that share a scale; 0 means all inputs. Only integer formats have groups, which
    are multiples of 8. Integer formats take at most 65536 inputs. Only int8 without groups has static inputs. Raises
    ValueError for other sizes.
    """
    code = weight_format(fmt).kernel_code
    num_bytes = int(
        load_library().llmk_packed_weight_bytes(code, columns, depth, group, int(biased), int(static_inputs))
    )
    if num_bytes == 0:
        more = " and static inputs" if static_inputs else ""
        raise ValueError(f"no packed {fmt} weight can have {columns} columns, depth {depth}, group {group}{more}")
    return num_bytes


def weight_blob(num_bytes: int) -> Blob:
    """Returns zeroed memory for a blob, aligned to 64 bytes.

    Blobs of at least half a megabyte use huge pages if the system has them.
    """
    if num_bytes < _HUGE_PAGE // 4:
        raw = np.zeros(num_bytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        return raw[start : start + num_bytes]
    # MAP_PRIVATE is necessary, because the shared memory that mmap creates by default gets no huge pages.
    size = (-(-num_bytes // _HUGE_PAGE) + 1) * _HUGE_PAGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % _HUGE_PAGE
    return raw[start : start + num_bytes]


def _check(name: str, array: Array | None, shape: tuple[int, ...], dtype: Any) -> int | None:
    """Returns the array's address. Raises ValueError unless it is a contiguous array of this shape and type."""
    if array is None:
        return None
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(
            f"{name} is {array.dtype} {array.shape}, contiguous {array.flags.c_contiguous}; "
            f"it must be contiguous {np.dtype(dtype)} {shape}"
        )
    return int(array.ctypes.data)


def _checked_inputs(inputs: StaticInputs | None, columns: int, depth: int) -> dict[str, int | None]:
    """Checks the scales and offsets for the inputs of a layer. Returns the addresses of these arrays.

    The keys of the result are names of members of the C struct PackSource. Raises ValueError for a wrong size or type.
    """
    if inputs is None:
        return {}
    return {
        "input_inverses": _check("inverses", inputs.inverses, (depth,), np.float32),
        "input_offsets": _check("offsets", inputs.offsets, (depth,), np.float32),
        "sum_offsets": _check("sum_offsets", inputs.sum_offsets, (columns,), np.int32),
    }


def pack_weight(
    fmt: str, values: Array, out_blob: Blob, *, group: int = 0, gated: bool = False, asymmetric: bool = False,
    source_dtype: str = "float32", scales: Array | None = None, zeros: Array | None = None, bias: Array | None = None,
    static_inputs: StaticInputs | None = None, activation: str = "silu",
) -> None:  # fmt: skip
    """Packs ``values`` [columns, depth] into ``out_blob``, which must have at least ``packed_weight_bytes`` bytes.

    Without ``scales``, ``values`` are floats of ``source_dtype`` (bfloat16 as uint16). If ``fmt`` is an integer format,
    this function quantises them. With ``scales`` float32 [columns, groups], ``values`` are already integers: int8, or
    uint8 from 0 to 15 for int4. ``zeros`` uint8 [columns, groups] are the zero points of int4, from 0 to 16. If
    ``zeros`` is None, all zero points are 8.

    If ``gated``, the first half of the columns is the gate of ``activation``, and the second half is its second factor,
    ``up``. ``GATES`` lists the activations. ``bias`` float32 [columns] is added to the output. ``static_inputs`` are
    only for int8 with ``scales``.

    Raises ValueError if the arrays do not fit, and KernelError if the kernel refuses them.
    """
    if values.ndim != 2:
        raise ValueError(f"a weight has 2 dimensions, [columns, depth]; this one has shape {values.shape}")
    if source_dtype not in _SOURCE_DTYPES:
        raise ValueError(f"source_dtype {source_dtype!r} is not known; there are {', '.join(_SOURCE_DTYPES)}")
    wanted, (columns, depth) = weight_format(fmt), values.shape
    if scales is not None and wanted.is_float:
        raise ValueError(f"a {fmt} weight has no scales")
    packed_weight_bytes(fmt, columns, depth, group)
    groups = (columns, -(-depth // group) if group else 1)
    given = _SOURCE_DTYPES[source_dtype] if scales is None else np.dtype(wanted.storage)
    source = _PackSource(
        format=wanted.kernel_code, source_dtype=list(_SOURCE_DTYPES).index(source_dtype), columns=columns, depth=depth,
        gate=GATES[activation] if gated else 0, group=group, asymmetric=asymmetric,
        values=_check("values", values, (columns, depth), given),
        scales=_check("scales", scales, groups, np.float32),
        zeros=_check("zeros", zeros, groups, np.uint8),
        bias=_check("bias", bias, (columns,), np.float32),
        **_checked_inputs(static_inputs, columns, depth),
    )  # fmt: skip
    if out_blob.dtype != np.uint8 or not out_blob.flags.c_contiguous or not out_blob.flags.writeable:
        raise ValueError("the blob must be contiguous, writeable uint8; weight_blob() makes one")
    if load_library().llmk_pack_weight(ctypes.byref(source), out_blob.ctypes.data, out_blob.size) != 0:
        raise KernelError(f"packing a {fmt} weight of {columns} x {depth} failed; the reason is on standard error")


def join_weight_parts(blob: Blob, parts: int) -> None:
    """Joins ``parts`` packed weights to one weight. The parts are for consecutive ranges of the inputs. The product
    with the joined weight is the sum of the products with the parts, added in float32.

    The first 64 bytes of ``blob`` receive the header of the joined weight. The caller has placed the packed parts after
    them, each aligned to 64 bytes. Raises KernelError if the parts do not fit together.
    """
    if load_library().llmk_join_weight_parts(blob.ctypes.data, blob.size, parts) != 0:
        raise KernelError(f"{parts} parts of a weight could not be joined; the reason is on standard error")
