"""Packs the weights of native primitives on a CPU. The kernels find the packed copy of a weight by the weight's
address.

MindSpore passes the original weight to a primitive, in the layout that the primitive's documentation requires. The
kernels multiply by a packed copy (ops/linear.h) and never read the original. So the memory of the original can be given
back to the system. Any later access to this memory then ends the process, so no code can read wrong numbers.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.kernels.library import KernelError, load_library, structure
from agent.kernels.packing import Blob, weight_blob
from llm_serving.ipc.alignment import aligned
from llm_serving.model.number_formats import weight_format

Array = npt.NDArray[Any]

VALUE_TYPES = ("float32", "float16", "bfloat16", "int8", "int4")
"""Names of the values of llmk::ValueType, in the order of their numbers."""
_SCALE_TYPES = VALUE_TYPES[:3]
_STORAGE: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int8": np.int8,
    "int4": np.int8,
}
_PROT_NONE, _PROT_READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE


@dataclass(frozen=True, slots=True)
class PrimitiveWeight:
    """A weight in the layout of its primitive (ops/primitive_weight.h), or the weights of all experts of a layer.

    The arrays for all experts have one more axis: the first axis is the expert. In int4 weights, a byte has two values.
    The value with the even index is in the low four bits.
    """

    values: Array
    type: str
    """Type of the values, one of ``VALUE_TYPES``."""
    transposed: bool = True
    """True: [out, in] with scales [out] or [out, groups]. False: [in, out] with scales [out] or [groups, out]."""
    scales: Array | None = None
    offsets: Array | None = None
    scale_type: str = "float32"
    group: int = 0
    """Number of inputs that share a scale. 0 means all inputs."""
    float_products: bool = False
    """True if the integer weight is multiplied by float activations (primitive WeightQuantBatchMatmul)."""
    sum_offsets: Array | None = None
    """int32 [out]: numbers that are added to the integer sums of an int8 weight, if the primitive QuantV2 quantises the
    inputs. None if the primitive DynamicQuantExt quantises the inputs.
    """
    gated: bool = False
    """True if the outputs are gate and factor of Swiglu, each one half. Then a fusion of the product with Swiglu can
    compute both in one pass (plugin/quantised_fusion.h). The results of the primitives do not change.
    """


_PrimitiveWeight = structure(
    "PrimitiveWeight",
    "pointer: values scales offsets sum_offsets; int32: type scale_type transposed float_products; int64: columns depth"
    " group; int32: gated",
)
"""A ctypes class with the members of llmk::PrimitiveWeight in ops/primitive_weight.h."""


class KeptWeights:
    """Packs weights and owns the packed copies.

    ``close`` frees the copies and makes the originals' memory accessible again, filled with zeros. The original arrays
    must live until then.
    """

    def __init__(self) -> None:
        self._library = load_library()
        self._kept: dict[int, tuple[PrimitiveWeight, Blob]] = {}
        self._released: list[tuple[int, int]] = []

    @property
    def num_bytes(self) -> int:
        """Total size of all packed copies in bytes."""
        return sum(blob.nbytes for _, blob in self._kept.values())

    def keep(self, weight: PrimitiveWeight, *, release: bool) -> None:
        """Packs a weight that will not change. With ``release``, gives the memory of its values back to the system.

        Raises ValueError if the arrays do not fit the layout, and KernelError if the kernels refuse the weight.
        """
        weights = _matrices(weight)
        described = [_described(each) for each in weights]
        num_bytes = int(self._library.llmk_primitive_blob_bytes(ctypes.byref(described[0])))
        if num_bytes == 0:
            raise ValueError(
                f"no {weight.type} weight can have {described[0].columns} outputs, {described[0].depth} inputs and "
                f"groups of {weight.group}"
            )
        stride = aligned(num_bytes)
        blobs = weight_blob(stride * (len(weights) - 1) + num_bytes)
        for index, each in enumerate(weights):
            blob = blobs[index * stride : index * stride + num_bytes]
            if self._library.llmk_keep_primitive(ctypes.byref(described[index]), blob.ctypes.data, blob.size) != 0:
                raise KernelError(f"packing a {weight.type} weight failed; the reason is on standard error")
            self._kept[each.values.ctypes.data] = (each, blob)
        if release:
            self._release(weight.values)

    def close(self) -> None:
        """Frees the packed copies of all weights. May be called twice."""
        for address in self._kept:
            self._library.llmk_forget_primitive(address)
        for start, size in self._released:
            _protect(start, size, _PROT_READ_WRITE)
        self._released.clear()
        # Frees the arrays. This is the last statement, because the memory of the arrays must be writable before it is
        # freed.
        self._kept.clear()

    def _release(self, values: Array) -> None:
        """Gives the whole pages of an array's memory back to the system. Does not touch pages that also hold other
        arrays.
        """
        start = -(-values.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (values.ctypes.data + values.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if size > 0:
            _system("madvise", start, size, mmap.MADV_DONTNEED)
            _protect(start, size, _PROT_NONE)
            self._released.append((start, size))


def _matrices(weight: PrimitiveWeight) -> list[PrimitiveWeight]:
    """Returns one weight for each expert, as views, or only the weight itself if it has no experts."""
    if weight.values.ndim == 2:
        return [weight]
    return [
        replace(
            weight,
            values=values,
            scales=None if weight.scales is None else weight.scales[index],
            offsets=None if weight.offsets is None else weight.offsets[index],
        )
        for index, values in enumerate(weight.values)
    ]


def _described(weight: PrimitiveWeight) -> ctypes.Structure:
    if weight.type not in VALUE_TYPES:
        raise ValueError(f"a weight of type {weight.type!r} is not known; there are {', '.join(VALUE_TYPES)}")
    if weight.values.ndim != 2 or weight.values.dtype != _STORAGE[weight.type]:
        raise ValueError(f"a weight of {weight.type} is {weight.values.dtype} {weight.values.shape}")
    outer, inner = weight.values.shape
    inner *= weight_format(weight.type).values_per_byte
    columns, depth = (outer, inner) if weight.transposed else (inner, outer)
    groups = -(-depth // weight.group) if weight.group else 1
    for array in (weight.values, weight.scales, weight.offsets):
        if array is None:
            continue
        if not array.flags.c_contiguous:
            raise ValueError("the arrays of a weight must be contiguous")
        if array is not weight.values and (
            array.size != columns * groups or array.dtype != _STORAGE[weight.scale_type]
        ):
            raise ValueError(f"scales and offsets are {columns * groups} of {weight.scale_type}, not {array.shape}")
    sums = weight.sum_offsets
    if sums is not None and (sums.shape != (columns,) or sums.dtype != np.int32 or not sums.flags.c_contiguous):
        raise ValueError(f"sum offsets are {columns} of int32, not {sums.shape} of {sums.dtype}")
    if (weight.scales is None) != (weight.type in _SCALE_TYPES):
        raise ValueError(f"a weight of {weight.type} {'needs' if weight.scales is None else 'has no'} scales")
    return _PrimitiveWeight(
        values=weight.values.ctypes.data,
        scales=None if weight.scales is None else weight.scales.ctypes.data,
        offsets=None if weight.offsets is None else weight.offsets.ctypes.data,
        sum_offsets=None if sums is None else sums.ctypes.data,
        type=VALUE_TYPES.index(weight.type),
        scale_type=_SCALE_TYPES.index(weight.scale_type) if weight.scales is not None else 0,
        transposed=weight.transposed,
        float_products=weight.float_products,
        columns=columns,
        depth=depth,
        group=weight.group,
        gated=weight.gated,
    )


def _protect(start: int, size: int, protection: int) -> None:
    _system("mprotect", start, size, protection)


def _system(name: str, start: int, size: int, value: int) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if function(start, size, value) != 0:
        raise OSError(ctypes.get_errno(), f"{name} of {size} bytes failed")
