"""Reads folders of msModelSlim and golden-stick, whose description file states the scheme of every tensor.

W8A8_DYNAMIC, W8A16:  weight         int8 [out, in]
                      weight_scale   float [out, 1]
                      weight_offset  float [out, 1], zeros
W4A16:                weight         int8 [out / 2, in], [out, in / 2] or [out, in]
                      weight_scale   float [out, groups]
                      weight_offset  float [out, groups]

value = (integer - offset) * scale, with integers from -8 to 7 in W4A16. A byte of a packed weight holds two outputs or
two inputs, the even one in the low bits. msModelSlim packs outputs if inputs have groups, and inputs if not. Its
older format does not pack.

Source: msModelSlim, ``ComplexQuantifier`` and ``AscendV1Saver``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from agent.weights.decoder import FLOAT_TYPES, Axis, Decoder, StoredTensor, StoredTensors
from agent.weights.layout import WeightPart
from agent.weights.quantized import QuantizedTensor, without_usual_zeros
from agent.weights.storage import Array

_PER_BYTE = 2


class ModelSlimDecoder(Decoder):
    """Decodes weights by the scheme that the folder's description gives each of them."""

    marker = "weight_scale"
    axes: ClassVar[dict[str, tuple[Axis, ...]]] = {
        "weight": ("out_words", "in_words"),
        "weight_scale": ("out", "group"),
        "weight_offset": ("out", "group"),
    }

    @property
    def per_word(self) -> int:
        return _PER_BYTE

    def is_quantised(self, name: str, exists: Callable[[str], bool]) -> bool:
        assert self.quantization.description is not None, "the layout has a description"
        return name in self.quantization.description.schemes

    def stored(self, part: WeightPart) -> tuple[StoredTensor, ...]:
        stem, groups = _stem(part), self.groups(part)
        per_group = _per_group(part, groups)
        return (
            StoredTensor(f"{stem}.weight", ("I8",), self._weight_shapes(part)),
            StoredTensor(f"{stem}.weight_scale", FLOAT_TYPES, per_group),
            StoredTensor(f"{stem}.weight_offset", (*FLOAT_TYPES, "I8", "I32"), per_group, optional=True),
        )

    def _weight_shapes(self, part: WeightPart) -> tuple[tuple[int, ...], ...]:
        rows, depth = part.shape
        if self.quantization.bits == 8:
            return (part.shape,)
        packed = ((rows // 2, depth),) if rows % 2 == 0 else ()
        return (*packed, *(((rows, depth // 2),) if depth % 2 == 0 else ()), part.shape)

    def decode(self, part: WeightPart, tensors: StoredTensors) -> QuantizedTensor:
        scheme, groups, zero = self.scheme(), self.groups(part), self.scheme().weights.zero
        shape = (part.shape[0], groups)
        scales = np.ascontiguousarray(tensors.floats("weight_scale").reshape(shape))
        offsets = self._offsets(shape, tensors)
        if not zero:
            if offsets.any():
                raise tensors.fail("weight_offset", "is not zero; 8-bit weights must be symmetric")
            return QuantizedTensor(scheme, np.array(tensors.array("weight")), scales)
        values = _unpacked(tensors.array("weight"), part.shape)
        if int(values.min(initial=0)) < -zero or int(values.max(initial=0)) >= zero:
            raise tensors.fail("weight", f"has integers outside of -{zero} to {zero - 1}")
        zeros = offsets + np.float32(zero)
        if (zeros != np.rint(zeros)).any() or zeros.min(initial=0) < 0 or zeros.max(initial=0) > 2 * zero:
            raise tensors.fail("weight_offset", f"must have whole numbers from -{zero} to {zero}")
        values += np.int8(zero)
        own = without_usual_zeros(zeros.astype(np.uint8), scheme)
        return QuantizedTensor(scheme, values.view(np.uint8), scales, own)

    def _offsets(self, shape: tuple[int, int], tensors: StoredTensors) -> npt.NDArray[np.float32]:
        """Returns the offsets [out, groups], or zeros if the folder has none."""
        stored = tensors.optional("weight_offset")
        if stored is None:
            return np.zeros(shape, np.float32)
        if stored.dtype in (np.int8, np.int32):
            return stored.astype(np.float32).reshape(shape)
        return tensors.floats("weight_offset").reshape(shape)


def _stem(part: WeightPart) -> str:
    return part.name.removesuffix(".weight")


def _per_group(part: WeightPart, groups: int) -> tuple[tuple[int, ...], ...]:
    rows = part.shape[0]
    return ((rows, 1), (rows,)) if groups == 1 else ((rows, groups),)


def _unpacked(stored: Array, shape: tuple[int, ...]) -> npt.NDArray[np.int8]:
    """Returns integers of 4 bits, one in each byte: int8 [out, in] in new memory."""
    if stored.shape == shape:
        return np.array(stored, np.int8)
    values = np.empty(shape, np.int8)
    pairs = (values[0::2], values[1::2]) if stored.shape[0] != shape[0] else (values[:, 0::2], values[:, 1::2])
    np.right_shift(np.left_shift(stored, 4), 4, out=pairs[0])
    np.right_shift(stored, 4, out=pairs[1])
    return values
