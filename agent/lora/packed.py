"""The adapter slots of the fused op table, packed for the kernels. ``agent/kernels/ops/lora.h`` describes the layout.

This module does not import MindSpore.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.kernels.library import load_library, structure
from agent.kernels.packing import Blob, weight_blob
from agent.lora.store import ModuleAdapter, ParameterAdapter
from agent.weights.layout import WeightSpec
from agent.weights.storage import STORAGE_DTYPES, Array
from llm_serving.ipc.alignment import aligned

_LANES = 16
"""Ranks are padded to a multiple of this number (``kRankLanes`` of agent/kernels/ops/lora.h)."""
_PANEL = 64
"""Columns of a panel of packed weights (``kPanelColumns`` of agent/kernels/ops/linear.h)."""
_DTYPES = ("float32", "float16", "bfloat16")
_LoraWeight = structure(
    "LoraWeight", "int32: dtype rank_groups; int64: depth; pointer: a scales vectors b"
)
"""A ctypes class with the members of llmk::LoraWeight in ops/lora.h."""
_VECTOR = np.dtype([("begin", np.int64), ("first_rank", np.int32), ("num_ranks", np.int32)])
"""The members of llmk::LoraVector in ops/lora.h."""


class PackedAdapter:
    """The adapter of one packed weight. Owns the memory that the kernels read."""

    def __init__(self, spec: WeightSpec, modules: Sequence[ModuleAdapter], dtype: str) -> None:
        """``modules`` has the adapters of the parameter's tensors, in the order of their rows.

        ``dtype`` is the type of the matrices. bfloat16 matrices are arrays of uint16.
        """
        columns, depth = spec.shape
        storage = STORAGE_DTYPES[dtype]
        ranks = np.cumsum([0, *(each.a.shape[0] for each in modules)])
        groups = -(-int(ranks[-1]) // _LANES)
        a = np.zeros((groups * _LANES, depth), storage)
        scales = np.zeros(groups * _LANES, np.float32)
        for each, first, end in zip(modules, ranks, ranks[1:], strict=False):
            a[first:end], scales[first:end] = each.a, each.scale
        blocks = [
            _block(columns_of, modules, ranks, storage)
            for columns_of in _vectors(columns, is_gated=spec.kind == "gated_linear")
        ]
        vectors = np.zeros(len(blocks), _VECTOR)
        vectors["begin"] = np.cumsum([0, *(block.size for _, block in blocks[:-1])])
        vectors["first_rank"] = [first for first, _ in blocks]
        vectors["num_ranks"] = [block.shape[0] for _, block in blocks]
        self._arrays: dict[str, npt.NDArray[Any]] = {
            "a": _pairs(a.reshape(groups, _LANES, depth).transpose(0, 2, 1), dtype),
            "scales": scales,
            "vectors": vectors,
            "b": np.concatenate([_pairs(block, dtype).ravel() for _, block in blocks]),
        }
        addresses = {name: array.ctypes.data for name, array in self._arrays.items()}
        self._struct = _LoraWeight(dtype=_DTYPES.index(dtype), rank_groups=groups, depth=depth, **addresses)

    @property
    def address(self) -> int:
        """The address of the structure that describes this adapter to the kernels."""
        return ctypes.addressof(self._struct)

    @property
    def num_bytes(self) -> int:
        """Size of the memory that ``move`` fills, in bytes. It is a multiple of 64."""
        return sum(aligned(array.nbytes) for array in self._arrays.values())

    def move(self, memory: Blob) -> Blob:
        """Moves the matrices to the beginning of ``memory``. Returns the rest of the memory. No kernel may run."""
        for name, array in self._arrays.items():
            target = memory[: array.nbytes].view(array.dtype).reshape(array.shape)
            target[...] = array
            self._arrays[name] = target
            setattr(self._struct, name, target.ctypes.data)
            memory = memory[aligned(array.nbytes) :]
        return memory


class PackedSlots:
    """The adapter slots of the kernels (``AdapterSlots``): a ``PackedAdapter`` for each weight that the adapter of a
    slot changes.
    """

    def __init__(self, num_slots: int, dtype: str, weights: Mapping[str, Array]) -> None:
        """``weights`` maps names of the model's parameters to packed weights, whose addresses must not change."""
        self._dtype, self._weights = dtype, weights
        self._packed: list[dict[str, PackedAdapter]] = [{} for _ in range(num_slots)]

    def replace(self, slot: int, adapters: Mapping[str, ParameterAdapter]) -> None:
        packed = {
            parameter: PackedAdapter(each.spec, each.modules, self._dtype) for parameter, each in adapters.items()
        }
        # The arrays of an adapter are small, and a step reads all of them. In one memory area, they can share huge
        # pages.
        memory = weight_blob(sum(each.num_bytes for each in packed.values()))
        for each in packed.values():
            memory = each.move(memory)
        set_adapter = load_library().llmk_set_adapter
        for parameter in self._packed[slot]:
            set_adapter(self._weights[parameter].ctypes.data, slot, None)
        self._packed[slot] = packed
        for parameter, each in packed.items():
            set_adapter(self._weights[parameter].ctypes.data, slot, each.address)


def _vectors(columns: int, *, is_gated: bool) -> Iterator[range]:
    """Yields the columns of each SIMD vector (up to 16 columns) of a packed weight, in the order of the weight's panels
    (``ops/linear.h``)."""
    if not is_gated:
        for first in range(0, -(-columns // _PANEL) * _PANEL, _LANES):
            yield range(first, max(first, min(first + _LANES, columns)))
        return
    half = columns // 2
    for first in range(0, -(-half // (_PANEL // 2)) * _PANEL // 2, _LANES):
        width = max(0, min(_LANES, half - first))
        yield range(first, first + width)
        yield range(half + first, half + first + width)


def _block(
    columns: range, modules: Sequence[ModuleAdapter], ranks: npt.NDArray[Any], storage: Any
) -> tuple[int, Array]:
    """Returns the part of an adapter that changes one SIMD vector of 16 columns: (first rank, B).

    The layers that a weight joins, such as q, k and v, have different ranks of the adapter. B [ranks, 16] has only the
    rows for the ranks that these columns use. ``first rank`` is the number of the first of these ranks. It and the
    number of rows are even. Additional rows are zeros.
    """
    touched = [
        index for index, each in enumerate(modules) if each.rows.start < columns.stop and columns.start < each.rows.stop
    ]
    if not touched or not columns:
        return 0, np.zeros((0, _LANES), storage)
    first = int(ranks[touched[0]]) // 2 * 2
    block = np.zeros((aligned(int(ranks[touched[-1] + 1]) - first, 2), _LANES), storage)
    for index in touched:
        module = modules[index]
        low, high = max(columns.start, module.rows.start), min(columns.stop, module.rows.stop)
        rows = slice(int(ranks[index]) - first, int(ranks[index + 1]) - first)
        values = module.b[low - module.rows.start : high - module.rows.start]
        block[rows, low - columns.start : high - columns.start] = values.T
    return first, block


def _pairs(matrix: Array, dtype: str) -> Array:
    """Returns a matrix [..., indices, 16] in pairs of indices, as the kernels read it (LoraWeight of ops/lora.h).

    If the number of indices is odd, adds zeros.
    """
    *outer, indices, lanes = matrix.shape
    padded = np.zeros((*outer, aligned(indices, 2), lanes), matrix.dtype)
    padded[..., :indices, :] = matrix
    pairs = padded.reshape(*outer, -1, 2, lanes)
    return np.ascontiguousarray(pairs.swapaxes(-1, -2) if dtype == "bfloat16" else pairs)
