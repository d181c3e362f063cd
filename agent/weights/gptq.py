"""Reads GPTQ folders (Frantar et al. 2023; written by AutoGPTQ and GPTQModel).

qweight  int32 [in * bits / 32, out]      A word has consecutive inputs of one output, from the lowest bits.
qzeros   int32 [groups, out * bits / 32]  A word has consecutive outputs. The format "gptq" stores zero point - 1.
scales   float [groups, out]
g_idx    int32 [in]                       The group of each input. Without ``desc_act``, the group of input i is
                                          i // group_size.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from agent.weights.decoder import (
    FLOAT_TYPES,
    Axis,
    Decoder,
    StoredTensor,
    StoredTensors,
    check_zero,
    stem_of,
    uneven_groups,
)
from agent.weights.layout import WeightPart
from agent.weights.quantized import QuantizedTensor, signed, unpacked, without_usual_zeros


class GPTQDecoder(Decoder):
    """Decodes GPTQ weights: integers of 4 bits, or of 8 bits without zero points."""

    marker = "qweight"
    axes: ClassVar[dict[str, tuple[Axis, ...]]] = {
        "qweight": ("in_words", "out"),
        "qzeros": ("group", "out_words"),
        "scales": ("group", "out"),
        "g_idx": ("in",),
        "bias": ("out",),
    }

    def stored(self, part: WeightPart) -> tuple[StoredTensor, ...]:
        (rows, depth), stem, groups = part.shape, stem_of(part.name), self.groups(part)
        return (
            StoredTensor(f"{stem}.qweight", ("I32",), ((self.words(part, depth), rows),)),
            StoredTensor(f"{stem}.qzeros", ("I32",), ((groups, self.words(part, rows)),)),
            StoredTensor(f"{stem}.scales", FLOAT_TYPES, ((groups, rows),)),
            StoredTensor(f"{stem}.g_idx", ("I32",), ((depth,),), optional=True),
            # For layers without a bias, AutoGPTQ writes a bias of zeros.
            StoredTensor(f"{stem}.bias", FLOAT_TYPES, ((rows,),), optional=True),
        )

    def decode(self, part: WeightPart, tensors: StoredTensors) -> QuantizedTensor:
        check_zero(tensors, "bias")
        bits = self.quantization.bits
        values = unpacked(tensors.array("qweight").T, bits)
        zeros = unpacked(tensors.array("qzeros"), bits)
        if self.quantization.zeros_minus_one:
            zeros += np.uint8(1)
            # The format "gptq" stores the zero point minus 1, modulo 2^bits. With 4 bits, 15 means zero point 0.
            zeros &= np.uint8(2**bits - 1)
        scales = np.ascontiguousarray(tensors.floats("scales").T)
        group_of_input = uneven_groups(part, self.groups(part), tensors, "g_idx")
        scheme = self.scheme()
        if scheme.weights.zero:
            own = without_usual_zeros(np.ascontiguousarray(zeros.T), scheme)
            return QuantizedTensor(scheme, values, scales, own, group_of_input)
        if (zeros != 1 << (bits - 1)).any():
            raise tensors.fail("qzeros", f"has zero points; {bits}-bit weights must be symmetric (sym: true)")
        return QuantizedTensor(scheme, signed(values, bits), scales, None, group_of_input)
