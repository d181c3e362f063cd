"""Loads integers, scales and offsets of linear layers in the forms of native primitives (``agent.weights.forms``).

Floats are quantised here and rounded to nearest. The scale is max|w| / 127 for 8 bits and max|w| / 7 for 4 bits. If
scales are stored in a 16-bit type, each scale is rounded to this type before the weights are divided by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agent.kernels.packing import StaticInputs
from agent.weights.forms import LinearForm, scale_type
from agent.weights.layout import WeightPart, WeightSpec, rows_of
from agent.weights.packed import joined_inputs, without_inputs
from agent.weights.quantized import QuantizedTensor
from agent.weights.source import WeightSource
from agent.weights.storage import Array, allocate, from_float32, to_float32
from llm_serving.errors import CheckpointError

_PIECE_ROWS = 256
"""Number of rows that are converted at a time."""


def load_primitive(spec: WeightSpec, form: LinearForm, source: WeightSource, dtype: str) -> dict[str, Array]:
    """Loads the weight ``spec`` in the form that a native primitive takes. Returns the parameters by name.

    The parameters are ``weight``, ``scale`` and, depending on ``form``, offsets and static inputs. Padding rows of the
    vocabulary have integers and scales of 0.

    Raises CheckpointError for stored integers that the primitive does not support. There are three cases:

    - The inputs of a group are not consecutive.
    - Groups of an expert's weight have zero points.
    - Tensors of one layer, such as q and k, have different static inputs (W8A8).
    """
    if spec.experts:
        return _load_experts(spec, form, source, dtype)
    kind = scale_type(form, dtype, of_experts=False)
    numbers = _read(spec, form, source, dtype, kind)
    weight, scales, offsets = numbers.integers, numbers.scales, numbers.offsets
    if form.weights.values_per_byte == 2:
        weight, scales, offsets = _pairs(weight), scales.T, offsets.T
    if form.group == 0:
        scales, offsets = scales.reshape(-1), offsets.reshape(-1)
    named = _named(spec, form, weight, _stored(scales, kind), _stored(offsets, kind))
    return named | _static_parameters(spec, numbers.inputs, dtype) if numbers.inputs is not None else named


def _static_parameters(spec: WeightSpec, inputs: StaticInputs, dtype: str) -> dict[str, Array]:
    stem, columns = spec.parameter.removesuffix(".weight"), spec.shape[0]
    sum_offsets = allocate((columns,), "int32")
    sum_offsets[: len(inputs.sum_offsets)], sum_offsets[len(inputs.sum_offsets) :] = inputs.sum_offsets, 0
    return {
        f"{stem}.input_scale": _stored(inputs.inverses, dtype),
        f"{stem}.input_offset": _stored(inputs.offsets, dtype),
        f"{stem}.sum_offset": sum_offsets,
    }


def _load_experts(spec: WeightSpec, form: LinearForm, source: WeightSource, dtype: str) -> dict[str, Array]:
    """Loads one linear weight of all experts of a layer: [experts, in, out], with scales and offsets of each expert."""
    kind, per_byte = scale_type(form, dtype, of_experts=True), form.weights.values_per_byte
    columns, depth = spec.expert(0).shape
    weight = allocate((spec.experts, depth, columns // per_byte), "int8")
    rows = (depth // form.group, columns) if form.group else (columns,)
    scales, offsets = (allocate((spec.experts, *rows), kind) for _ in range(2))
    for index in range(spec.experts):
        each = spec.expert(index)
        numbers = _read(each, form, source, dtype, kind)
        if form.group and numbers.offsets.any():
            raise CheckpointError(
                f"tensor {each.parts[0].name}: its groups have zero points; GroupedMatmulV4 supports them only for "
                "whole rows; set model_config.weight_format = auto to dequantise it"
            )
        weight[index] = _pairs(numbers.integers) if per_byte == 2 else numbers.integers.T
        scales[index] = from_float32(np.ascontiguousarray(numbers.scales.T).reshape(rows), kind)
        offsets[index] = from_float32(np.ascontiguousarray(numbers.offsets.T).reshape(rows), kind)
    return _named(spec, form, weight, scales, offsets)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A quantised weight: integers [out, in], scales and offsets [out, groups]. value = (integer + offset) * scale."""

    integers: Array
    scales: npt.NDArray[np.float32]
    offsets: npt.NDArray[np.float32]
    inputs: StaticInputs | None = None
    """The calibrated scales and offsets with which the layer quantises its inputs. ``scales`` then include the scale of
    the inputs."""


def _read(spec: WeightSpec, form: LinearForm, source: WeightSource, dtype: str, kind: str) -> _Numbers:
    """Reads the stored integers of one weight, or reads floats and quantises them.

    ``kind`` is the type to which the scales will be rounded.
    """
    columns, depth = spec.shape
    groups = -(-depth // form.group) if form.group else 1
    integers = allocate((columns, depth), "int8")
    scales = np.empty((columns, groups), np.float32)
    offsets = np.zeros((columns, groups), np.float32)
    static: list[StaticInputs] = []
    for part, rows in rows_of(spec.parts):
        if form.stored is None:
            _quantise(source, part, form, (dtype, kind), integers[rows], scales[rows])
            continue
        tensor = source.read_quantised(part)
        if tensor.inputs is not None and form.is_static:
            static.append(tensor.inputs)
        else:
            tensor = without_inputs(tensor, part.name)
        _take(tensor, part, integers[rows], scales[rows], offsets[rows])
    held = sum(part.shape[0] for part in spec.parts)
    integers[held:], scales[held:] = 0, 0
    return _Numbers(integers, scales, offsets, joined_inputs(static, spec) if static else None)


def _named(spec: WeightSpec, form: LinearForm, weight: Array, scales: Array, offsets: Array) -> dict[str, Array]:
    stem = spec.parameter.removesuffix(".weight")
    named = {f"{stem}.weight": weight, f"{stem}.scale": scales}
    return named | {f"{stem}.offset": offsets} if form.has_offsets else named


def _quantise(
    source: WeightSource,
    part: WeightPart,
    form: LinearForm,
    types: tuple[str, str],
    integers: Array,
    scales: npt.NDArray[np.float32],
) -> None:
    """Reads a tensor of floats, quantises it, and writes the result to ``integers`` and ``scales``.

    ``types`` has two names: the type of the activations, and the type to which the scales will be rounded.
    """
    (dtype, kind), (rows, depth) = types, part.shape
    kept = source.float_dtype(part.name) or dtype
    values, largest = allocate((rows, depth), kept), np.float32(form.weights.largest)
    source.read_into(part.name, values, kept)
    group = form.group or depth
    for start in range(0, rows, _PIECE_ROWS):
        piece = slice(start, start + _PIECE_ROWS)
        floats = to_float32(values[piece], kept)
        found = np.maximum.reduceat(np.abs(floats), np.arange(0, depth, group), axis=1) / largest
        found = to_float32(from_float32(found, kind), kind)
        scales[piece] = found
        with np.errstate(divide="ignore"):
            inverse = np.float32(1) / found
        inverse[~np.isfinite(inverse)] = 0
        floats = floats * np.repeat(inverse, group, axis=1)[:, :depth]
        integers[piece] = np.clip(np.rint(floats), -largest, largest)


def _take(
    tensor: QuantizedTensor,
    part: WeightPart,
    integers: Array,
    scales: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.float32],
) -> None:
    """Copies a stored quantised tensor to ``integers``, ``scales`` and ``offsets``.

    The copied integers are signed, with value = (integer + offset) * scale.
    """
    if tensor.group_of_input is not None:
        raise CheckpointError(
            f"tensor {part.name}: its groups are not consecutive inputs (GPTQ's desc_act), which "
            "WeightQuantBatchMatmul does not support; set model_config.weight_format = auto to dequantise it"
        )
    scales[:] = tensor.scales
    zero = tensor.scheme.weights.zero
    np.subtract(tensor.values.view(np.int8), np.int8(zero), out=integers)
    if tensor.zeros is not None:
        offsets[:] = zero - tensor.zeros.astype(np.float32)


def _pairs(integers: Array) -> Array:
    """Packs integers [out, in] between -8 and 7 into int8 [in, out / 2].

    A byte has two outputs. The output with the even index is in the low bits.
    """
    columns, depth = integers.shape
    out = allocate((depth, columns // 2), "int8")
    for start in range(0, columns, _PIECE_ROWS):
        low, high = integers[start : start + _PIECE_ROWS : 2], integers[start + 1 : start + _PIECE_ROWS : 2]
        out[:, start // 2 : start // 2 + len(low)] = ((low & 15) | (high << 4)).T
    return out


def _stored(values: npt.NDArray[np.float32], dtype: str) -> Array:
    out = allocate(values.shape, dtype)
    out[...] = from_float32(np.ascontiguousarray(values), dtype)
    return out
