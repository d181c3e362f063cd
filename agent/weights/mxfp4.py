"""Reads weights of experts in the format MXFP4, as gpt-oss stores them: 4-bit floats, with a scale for 32 inputs.

experts.gate_up_proj_blocks  U8 [experts, out, groups, 16]   two 4-bit floats in a byte, the first in the low bits
experts.gate_up_proj_scales  U8 [experts, out, groups]       exponent + 127; 255 is not a number

A 4-bit float (e2m1) has 1 sign bit, 2 exponent bits and 1 mantissa bit. Its sizes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
value = float * 2^(scale - 127). The weights are read as int8 in groups of 32: the integer is twice the float, and the
scale is half of 2^(scale - 127). Both are exact.

Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agent.weights.cuts import TensorCut
from agent.weights.decoder import StoredTensor
from agent.weights.layout import WeightPart
from agent.weights.quantized import QuantizedTensor, Scheme
from agent.weights.tensor_files import TensorFiles
from llm_serving.errors import CheckpointError
from llm_serving.model.mxfp4 import MXFP4_GROUP
from llm_serving.model.parallel import Span

SCHEME = Scheme("int8", MXFP4_GROUP)
DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the value of each of the 16 4-bit floats."""
_PAIRS = np.stack([np.tile(DOUBLED, 16), np.repeat(DOUBLED, 16)], 1).view(np.uint16)[:, 0]
"""For each of the 256 values of a stored byte: its two doubled floats as int8, together one 16-bit number."""
_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_BYTES = MXFP4_GROUP // 2
"""Bytes of the 4-bit floats that share a scale."""
_NOT_A_NUMBER = 255
"""The exponent of a scale that is NaN."""

Bytes = npt.NDArray[np.uint8]


def scales_of(exponents: Bytes) -> npt.NDArray[np.float32]:
    """Returns the scales for the values of ``DOUBLED``, float32, for stored exponents of any shape.

    These values are twice the 4-bit floats, so each scale is half of the stored one. Raises CheckpointError for an
    exponent that stands for NaN.
    """
    if bool((exponents == _NOT_A_NUMBER).any()):
        raise CheckpointError("a scale of type MXFP4 is not a number")
    scales: npt.NDArray[np.float32] = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)
    return scales


class Mxfp4Reader:
    """Reads the tensors of a folder that hold the weights of all experts as MXFP4."""

    def __init__(self, files: TensorFiles) -> None:
        self._files = files

    def holds(self, name: str) -> bool:
        """Returns True if the weights ``name`` are stored as MXFP4, in a tensor of blocks and a tensor of scales."""
        return name + _BLOCKS in self._files

    def stored(self, part: WeightPart) -> tuple[StoredTensor, ...]:
        """Returns the tensors that the folder must contain for the weights ``part`` [experts, in, out].

        Raises CheckpointError if the inputs are not whole groups.
        """
        experts, depth, outputs = part.shape
        if depth % MXFP4_GROUP:
            raise CheckpointError(f"tensor {part.name}: its {depth} inputs are not whole groups of {MXFP4_GROUP}")
        groups = (experts, outputs, depth // MXFP4_GROUP)
        return (
            StoredTensor(part.name + _BLOCKS, ("U8",), ((*groups, _BLOCK_BYTES),)),
            StoredTensor(part.name + _SCALES, ("U8",), (groups,)),
        )

    def read(self, part: WeightPart, cut: TensorCut | None = None) -> QuantizedTensor:
        """Reads the weights ``part`` [experts x out, in], or one part of them, into new memory.

        Raises CheckpointError for a scale that is not a number, and for a cut within a group.
        """
        rows = Span(0, part.shape[0]) if cut is None else cut.rows
        blocks, exponents = self._rows(part.name + _BLOCKS, rows), self._rows(part.name + _SCALES, rows)
        values = _PAIRS[blocks.reshape(len(blocks), -1)].view(np.int8)
        try:
            scales = scales_of(exponents)
        except CheckpointError as reason:
            raise CheckpointError(f"tensor {part.name}{_SCALES}: {reason}") from reason
        self._files.count(blocks.nbytes + exponents.nbytes)
        tensor = QuantizedTensor(SCHEME, values, scales)
        if cut is None or cut.columns is None:
            return tensor
        return TensorCut(values.shape, Span(0, len(values)), cut.columns).of_quantised(tensor)

    def release(self, name: str) -> None:
        """Frees the memory pages into which the weights ``name`` were read."""
        for end in (_BLOCKS, _SCALES):
            self._files.release(name + end)

    def _rows(self, name: str, rows: Span) -> Bytes:
        found = self._files.read_optional(name)
        assert found is not None, "the checkpoint has been checked for required tensors"
        experts, outputs, *rest = found[0].shape
        return found[0].reshape(experts * outputs, *rest)[rows.slice]
