"""Reads AWQ folders in the gemm layout (Lin et al. 2024; written by AutoAWQ).

qweight  int32 [in, out / 8]      Column j has outputs 8j to 8j + 7, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the
                                  lowest bits.
qzeros   int32 [groups, out / 8]  Zero points, in the same order.
scales   float [groups, out]
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from agent.weights.decoder import FLOAT_TYPES, Axis, Decoder, StoredTensor, StoredTensors, check_zero, stem_of
from agent.weights.layout import WeightPart
from agent.weights.quantized import QuantizedTensor, bytes_of, without_usual_zeros
from agent.weights.storage import Array

_OUTPUT_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)


class AWQDecoder(Decoder):
    """Decodes AWQ weights: integers of 4 bits with zero points."""

    marker = "qweight"
    axes: ClassVar[dict[str, tuple[Axis, ...]]] = {
        "qweight": ("in", "out_words"),
        "qzeros": ("group", "out_words"),
        "scales": ("group", "out"),
        "bias": ("out",),
    }

    def stored(self, part: WeightPart) -> tuple[StoredTensor, ...]:
        (rows, depth), stem, groups = part.shape, stem_of(part.name), self.groups(part)
        words = self.words(part, rows)
        return (
            StoredTensor(f"{stem}.qweight", ("I32",), ((depth, words),)),
            StoredTensor(f"{stem}.qzeros", ("I32",), ((groups, words),)),
            StoredTensor(f"{stem}.scales", FLOAT_TYPES, ((groups, rows),)),
            StoredTensor(f"{stem}.bias", FLOAT_TYPES, ((rows,),), optional=True),
        )

    def decode(self, part: WeightPart, tensors: StoredTensors) -> QuantizedTensor:
        check_zero(tensors, "bias")
        values, zeros = _outputs_first(tensors.array("qweight")), _outputs_first(tensors.array("qzeros"))
        scales = np.ascontiguousarray(tensors.floats("scales").T)
        return QuantizedTensor(self.scheme(), values, scales, without_usual_zeros(zeros, self.scheme()))


def _outputs_first(words: Array) -> npt.NDArray[np.uint8]:
    """Unpacks 4-bit integers from int32 [rows, out / 8] to uint8 [out, rows].

    Transposes the int32 words before unpacking them. This moves one word instead of eight integers.
    """
    four = bytes_of(words.T).reshape(words.shape[1], len(words), 4)
    values = np.empty((words.shape[1], 8, len(words)), np.uint8)
    for byte in range(4):
        np.bitwise_and(four[:, :, byte], 15, out=values[:, _OUTPUT_OF_NIBBLE[2 * byte]])
        np.right_shift(four[:, :, byte], 4, out=values[:, _OUTPUT_OF_NIBBLE[2 * byte + 1]])
    return values.reshape(-1, len(words))
