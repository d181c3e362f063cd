"""Reads folders of msModelSlim and golden-stick, whose description file states the scheme of every tensor.

W8A8_DYNAMIC, W8A16:  weight         int8 [out, in]
                      weight_scale   float [out, 1]
                      weight_offset  float [out, 1], zeros
W8A8:                 weight         int8 [out, in]
                      deq_scale      float32 [out], or its bits as int64
                      quant_bias     int32 [out]
                      input_scale    float [1] or [in]
                      input_offset   float or int8 [1] or [in]
                      weight_scale, weight_offset as above, optional
W4A16:                weight         int8 [out / 2, in], [out, in / 2] or [out, in]
                      weight_scale   float [out, groups]
                      weight_offset  float [out, groups]

In W8A8, the inputs x are quantised with scales and offsets from a calibration (static inputs):
q = round(x / input_scale + input_offset). The output is (sum of q * weight + quant_bias) * deq_scale, where
deq_scale = input_scale * weight_scale. ``quant_bias`` removes the contribution of ``input_offset`` from the sum. If
msModelSlim wrote the folder, ``quant_bias`` also contains the layer's bias. If golden-stick wrote it,
``quant_bias`` does not contain the bias.

Some of msModelSlim's methods against outliers give norms a bias: the inputs of the layers after a norm are x + bias. In
W8A8, this bias becomes a part of the input offset, which is then input_offset + bias / input_scale.

In other schemes, value = (integer - offset) * scale. In W4A16, the integers are from -8 to 7. A byte of a packed weight
has the integers of two outputs or of two inputs; the even index is in the low bits. The newer format of msModelSlim
packs two outputs if inputs have groups, otherwise two inputs. The older format stores one integer in each byte.

Sources: msModelSlim, ``ComplexQuantifier`` and ``AscendV1Saver``; vllm-mindspore, ``A8W8LinearMethod``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from agent.kernels.packing import StaticInputs
from agent.weights.decoder import FLOAT_TYPES, Axis, Decoder, StoredTensor, StoredTensors, check_stored, check_zero
from agent.weights.layout import WeightPart
from agent.weights.quantized import QuantizedTensor, Scheme, without_usual_zeros
from agent.weights.storage import Array
from llm_serving.errors import CheckpointError
from llm_serving.model.quant_description import Description

_PER_BYTE = 2
"""Number of int4 values in a byte."""


class ModelSlimDecoder(Decoder):
    """Decodes the weights of a folder of msModelSlim or golden-stick. The folder's description file states the scheme
    of each weight.
    """

    marker = "weight_scale"
    axes: ClassVar[dict[str, tuple[Axis, ...]]] = {
        "weight": ("out_words", "in_words"),
        "weight_scale": ("out", "group"),
        "weight_offset": ("out", "group"),
        "deq_scale": ("out",),
        "quant_bias": ("out",),
        "input_scale": ("in",),
        "input_offset": ("in",),
    }

    @property
    def per_word(self) -> int:
        return _PER_BYTE

    def is_quantised(self, name: str, exists: Callable[[str], bool]) -> bool:
        return name in self._description.schemes

    @property
    def _description(self) -> Description:
        assert self.quantization.description is not None, "the layout has a description"
        return self.quantization.description

    def scheme_of(self, name: str) -> Scheme:
        if not self._description.schemes[name].static:
            return self.scheme()
        return replace(self.scheme(), static=True, sums_hold_bias=self._description.sums_hold_bias)

    def stored(self, part: WeightPart) -> tuple[StoredTensor, ...]:
        stem, groups = _stem(part), self.groups(part)
        per_group = _per_group(part, groups)
        if self.scheme_of(part.name).static:
            return _static_tensors(part)
        return (
            StoredTensor(f"{stem}.weight", ("I8",), self._weight_shapes(part)),
            StoredTensor(f"{stem}.weight_scale", FLOAT_TYPES, per_group),
            StoredTensor(f"{stem}.weight_offset", (*FLOAT_TYPES, "I8", "I32"), per_group, optional=True),
        )

    def other_tensors(
        self, names: Iterable[str], parts: Mapping[str, WeightPart], read: Callable[[str], tuple[Array, str] | None]
    ) -> set[str]:
        """Returns those of ``names`` that are biases of norms. A folder may have them, but the model does not.

        A bias must be zero, unless all layers after its norm have static inputs (W8A8). Otherwise raises
        CheckpointError.
        """
        found = {name: parts[_norm_weight(name)] for name in names if _norm_weight(name) in parts}
        for name, norm in found.items():
            self._check_norm_bias(name, norm, read)
        return set(found)

    def _check_norm_bias(self, name: str, norm: WeightPart, read: Callable[[str], tuple[Array, str] | None]) -> None:
        stored = read(name)
        assert stored is not None, "the name is that of a stored tensor"
        check_stored(StoredTensor(name, FLOAT_TYPES, (norm.shape,)), stored[1], stored[0].shape)
        bias = StoredTensors(name.removesuffix(".bias"), read).floats("bias")
        if not bias.any():
            return
        layer, _, kind = name.removesuffix(".bias").rpartition(".")
        behind = [f"{layer}.{stem}.weight" for stem, its_norm in _NORM_OF.items() if its_norm == kind]
        schemes = [self._description.schemes.get(each) for each in behind]
        if not behind or not all(each is not None and each.static for each in schemes):
            raise CheckpointError(
                f"tensor {name} is not zero; the bias of a norm is supported only before layers of scheme W8A8 "
                f"({', '.join(behind) or 'this norm has none'})"
            )

    def _weight_shapes(self, part: WeightPart) -> tuple[tuple[int, ...], ...]:
        rows, depth = part.shape
        if self.quantization.bits == 8:
            return (part.shape,)
        packed = ((rows // 2, depth),) if rows % 2 == 0 else ()
        return (*packed, *(((rows, depth // 2),) if depth % 2 == 0 else ()), part.shape)

    def decode(self, part: WeightPart, tensors: StoredTensors) -> QuantizedTensor:
        scheme = self.scheme_of(part.name)
        if scheme.static:
            return _decode_static(part, scheme, tensors)
        groups, zero = self.groups(part), scheme.weights.zero
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
        """Returns the offsets of a weight's integers, [out, groups]. If the folder has no offsets, returns zeros."""
        stored = tensors.optional("weight_offset")
        if stored is None:
            return np.zeros(shape, np.float32)
        return _numbers("weight_offset", tensors).reshape(shape)


_NORM_OF = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "self_attn.v_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
}
"""Maps each linear layer of a decoder layer to the norm whose result the linear layer takes as input."""


def _norm_weight(bias: str) -> str:
    """Returns the name of a norm's weight. ``bias`` is the name of the norm's bias; any other name returns ""."""
    return f"{bias.removesuffix('.bias')}.weight" if bias.endswith("norm.bias") else ""


def _norm_bias(part: WeightPart, tensors: StoredTensors) -> npt.NDArray[np.float32] | None:
    """Returns the bias [in] of the norm before a linear layer, or None if the norm has no bias or only zeros."""
    for stem, norm in _NORM_OF.items():
        if tensors.stem.endswith(f".{stem}"):
            layer = tensors.of(f"{tensors.stem.removesuffix(stem)}{norm}")
            bias = None if layer.optional("bias") is None else layer.floats("bias")
            return bias if bias is not None and bias.any() else None
    return None


def _stem(part: WeightPart) -> str:
    return part.name.removesuffix(".weight")


def _static_tensors(part: WeightPart) -> tuple[StoredTensor, ...]:
    stem, (rows, depth) = _stem(part), part.shape
    per_row, per_input = ((rows,), (rows, 1)), ((1,), (depth,))
    return (
        StoredTensor(f"{stem}.weight", ("I8",), (part.shape,)),
        StoredTensor(f"{stem}.deq_scale", ("F32", "I64"), per_row),
        StoredTensor(f"{stem}.quant_bias", ("I32",), per_row),
        StoredTensor(f"{stem}.input_scale", FLOAT_TYPES, per_input),
        StoredTensor(f"{stem}.input_offset", (*FLOAT_TYPES, "I8", "I32"), per_input),
        # weight_scale is optional and is not read, because deq_scale already contains it.
        StoredTensor(f"{stem}.weight_scale", FLOAT_TYPES, per_row, optional=True),
        StoredTensor(f"{stem}.weight_offset", (*FLOAT_TYPES, "I8", "I32"), per_row, optional=True),
    )


def _decode_static(part: WeightPart, scheme: Scheme, tensors: StoredTensors) -> QuantizedTensor:
    check_zero(tensors, "weight_offset")
    rows, depth = part.shape
    input_scale = np.broadcast_to(tensors.floats("input_scale"), depth)
    if input_scale.min() <= 0:
        raise tensors.fail("input_scale", "must be above 0")
    sum_offsets = np.zeros(rows, np.int32)
    # The agents' results are added. Therefore only the agent with the first column uses ``quant_bias``.
    if tensors.has_first_column:
        sum_offsets[:] = tensors.array("quant_bias").reshape(rows)
    inverses, offsets = np.float32(1) / input_scale, np.array(np.broadcast_to(_numbers("input_offset", tensors), depth))
    norm_bias = _norm_bias(part, tensors)
    if norm_bias is not None:
        if not tensors.has_all_columns:
            raise tensors.fail("weight", "has the bias of a norm in its inputs, so agents cannot divide the inputs")
        offsets += norm_bias * inverses
    scales = _deq_scale(tensors).reshape(rows, 1)
    return QuantizedTensor(
        scheme,
        np.array(tensors.array("weight")),
        scales,
        inputs=StaticInputs(inverses, offsets, sum_offsets),
        has_norm_bias=norm_bias is not None,
    )


def _deq_scale(tensors: StoredTensors) -> npt.NDArray[np.float32]:
    """Returns ``deq_scale`` as float32. If a folder is for float16 models, each int64 has the bits of a float32."""
    stored = tensors.array("deq_scale")
    if stored.dtype != np.int64:
        return tensors.floats("deq_scale")
    if int(stored.min()) < 0 or int(stored.max()) > 0x7F7FFFFF:
        raise tensors.fail("deq_scale", "holds an integer that is not the bits of a positive float32")
    return stored.astype(np.uint32).view(np.float32)


def _numbers(end: str, tensors: StoredTensors) -> npt.NDArray[np.float32]:
    """Returns the tensor ``end``, which has floats or integers, as float32."""
    stored = tensors.array(end)
    return stored.astype(np.float32) if stored.dtype in (np.int8, np.int32) else tensors.floats(end)


def _per_group(part: WeightPart, groups: int) -> tuple[tuple[int, ...], ...]:
    rows = part.shape[0]
    return ((rows, 1), (rows,)) if groups == 1 else ((rows, groups),)


def _unpacked(stored: Array, shape: tuple[int, ...]) -> npt.NDArray[np.int8]:
    """Unpacks integers of 4 bits to int8 ``shape`` [out, in], in new memory.

    If ``stored`` already has this shape, each byte has one integer, so the array is only copied.
    """
    if stored.shape == shape:
        return np.array(stored, np.int8)
    values = np.empty(shape, np.int8)
    pairs = (values[0::2], values[1::2]) if stored.shape[0] != shape[0] else (values[:, 0::2], values[:, 1::2])
    np.right_shift(np.left_shift(stored, 4), 4, out=pairs[0])
    np.right_shift(stored, 4, out=pairs[1])
    return values
