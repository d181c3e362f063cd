"""Reads compressed-tensors folders (written by vLLM's llm-compressor and by ``tools/quantize.py``).

int-quantized:   weight            int8 [out, in]
                 weight_scale      float [out, groups]
pack-quantized:  weight_packed     int32 [out, in * bits / 32]   Consecutive inputs from the lowest bits. An integer q
                                                                 is stored as q + 2^(bits-1).
                 weight_scale      float [out, groups]
                 weight_zero_point int32 [out * bits / 32, groups] (packed along the outputs) or int8 [out, groups]
                 weight_shape      int [2]: out, in
                 weight_g_idx      int32 [in]: the group of each input

If there are no groups, weight_scale has one scale for each row, [out] or [out, 1], or one scale for the whole tensor,
[1].
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

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


class IntQuantizedDecoder(Decoder):
    """Decodes the layout ``int-quantized``: integers of 8 bits, one in each byte."""

    marker = "weight_scale"
    axes: ClassVar[dict[str, tuple[Axis, ...]]] = {
        "weight": ("out", "in"),
        "weight_scale": ("out", "group"),
        "weight_zero_point": ("out", "group"),
        "weight_g_idx": ("in",),
    }

    def stored(self, part: WeightPart) -> tuple[StoredTensor, ...]:
        stem, groups = stem_of(part.name), self.groups(part)
        return (
            StoredTensor(f"{stem}.weight", ("I8",), (part.shape,)),
            _stored_scales(part, groups),
            StoredTensor(f"{stem}.weight_zero_point", ("I8",), _per_group(part, groups), optional=True),
            StoredTensor(f"{stem}.weight_g_idx", ("I32",), ((part.shape[1],),), optional=True),
        )

    def decode(self, part: WeightPart, tensors: StoredTensors) -> QuantizedTensor:
        check_zero(tensors, "weight_zero_point")
        values = np.array(tensors.array("weight"))
        scales = _scales(part, self.groups(part), tensors)
        return QuantizedTensor(
            self.scheme(), values, scales, None, uneven_groups(part, self.groups(part), tensors, "weight_g_idx")
        )


class PackQuantizedDecoder(Decoder):
    """Decodes the layout ``pack-quantized``: integers of 4 or 8 bits, several in each int32 word."""

    marker = "weight_packed"
    axes: ClassVar[dict[str, tuple[Axis, ...]]] = {
        "weight_packed": ("out", "in_words"),
        "weight_scale": ("out", "group"),
        "weight_zero_point": ("out_words", "group"),
        "weight_g_idx": ("in",),
    }

    def stored(self, part: WeightPart) -> tuple[StoredTensor, ...]:
        (rows, depth), stem, groups = part.shape, stem_of(part.name), self.groups(part)
        per_word = 32 // self.quantization.bits
        zero_points = (-(-rows // per_word), groups)
        return (
            StoredTensor(f"{stem}.weight_packed", ("I32",), ((rows, -(-depth // per_word)),)),
            _stored_scales(part, groups),
            StoredTensor(f"{stem}.weight_shape", ("I64", "I32"), ((2,),)),
            StoredTensor(
                f"{stem}.weight_zero_point", ("I32", "I8"), (zero_points, *_per_group(part, groups)), optional=True
            ),
            StoredTensor(f"{stem}.weight_g_idx", ("I32",), ((depth,),), optional=True),
        )

    def decode(self, part: WeightPart, tensors: StoredTensors) -> QuantizedTensor:
        rows, depth, groups, bits = *part.shape, self.groups(part), self.quantization.bits
        whole = list(tensors.weight_shape or part.shape)
        if tensors.array("weight_shape").tolist() != whole:
            raise tensors.fail("weight_shape", f"is {tensors.array('weight_shape').tolist()}, not {whole}")
        values = np.ascontiguousarray(unpacked(tensors.array("weight_packed"), bits)[:, :depth])
        scales, group_of_input = _scales(part, groups, tensors), uneven_groups(part, groups, tensors, "weight_g_idx")
        if not self.scheme().weights.zero:
            check_zero(tensors, "weight_zero_point")
            return QuantizedTensor(self.scheme(), signed(values, bits), scales, None, group_of_input)
        zeros = self._zeros(rows, groups, tensors)
        return QuantizedTensor(self.scheme(), values, scales, zeros, group_of_input)

    def _zeros(self, rows: int, groups: int, tensors: StoredTensors) -> npt.NDArray[np.uint8] | None:
        stored = tensors.optional("weight_zero_point")
        if stored is None:
            return None
        scheme, zero = self.scheme(), self.scheme().weights.zero
        if stored.dtype == np.int8:
            if int(stored.min()) < -zero or int(stored.max()) >= zero:
                raise tensors.fail("weight_zero_point", f"has values outside of -{zero} to {zero - 1}")
            return without_usual_zeros((stored.reshape(rows, groups) + np.int8(zero)).astype(np.uint8), scheme)
        words = unpacked(stored.T, self.quantization.bits)
        return without_usual_zeros(np.ascontiguousarray(words[:, :rows].T), scheme)


def _per_group(part: WeightPart, groups: int) -> tuple[tuple[int, ...], ...]:
    rows = part.shape[0]
    return ((rows, 1), (rows,), (1,)) if groups == 1 else ((rows, groups),)


def _stored_scales(part: WeightPart, groups: int) -> StoredTensor:
    return StoredTensor(f"{stem_of(part.name)}.weight_scale", FLOAT_TYPES, _per_group(part, groups))


def _scales(part: WeightPart, groups: int, tensors: StoredTensors) -> npt.NDArray[np.float32]:
    scales, rows = tensors.floats("weight_scale"), part.shape[0]
    return np.full((rows, 1), scales, np.float32) if scales.size == 1 else scales.reshape(rows, groups)
