"""Packs the weights of linear layers for the kernels: one blob of bytes for each parameter (``agent.kernels.packing``).

The format of a packed weight depends on the checkpoint and on the setting ``weight_format``:

    checkpoint  weight_format                        packed format
    floats      auto or a float type                 model_dtype
    floats      an integer format                    weight_format; the floats are quantised here
    integers    auto                                 the stored format
    integers    a float type                         model_dtype; the integers are dequantised and rounded to nearest
    integers    a format that can use them unchanged weight_format, with the stored integers
    integers    any other integer format             none: raises ConfigError
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.kernels import packing as kernels
from agent.kernels.packing import StaticInputs, join_weight_parts, packed_weight_bytes, weight_blob
from agent.weights.layout import HeadRows, WeightSpec, rows_of
from agent.weights.quantized import QuantizedTensor, Scheme
from agent.weights.source import WeightSource
from agent.weights.storage import STORAGE_DTYPES, Array, allocate
from llm_serving.errors import CheckpointError, ConfigError
from llm_serving.ipc.alignment import CACHE_LINE_BYTES, aligned
from llm_serving.model.number_formats import AUTO, formats_of_stored, weight_format

_packing_lock = threading.Lock()
"""Lets only one thread pack at a time, because packing uses all kernel threads. Other threads can read tensors."""
OUTPUT_LAYER = "lm_head.weight"
"""The name of the output layer's weight."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Settings that decide the format of the packed weights of linear layers, from ``model_config``."""

    weight_format: str
    """``auto``, or the name of a weight format (``llm_serving.model.number_formats``)."""
    group: int = 64
    """Number of inputs that share a scale, if this program quantises floats to a format with groups. The last group of
    a layer may be shorter. Integers in a checkpoint keep the groups of the checkpoint.
    """
    asymmetric: bool = False
    """True if floats are quantised with zero points, provided that the format supports zero points."""
    output_format: str | None = None
    """The format of the output layer, if its weight is floats and ``weight_format`` is an integer format. None means
    ``weight_format``. Quantising the output layer costs the most quality (docs/quantization.md has figures).
    """

    def __post_init__(self) -> None:
        for name in (self.weight_format, self.output_format or AUTO):
            if name != AUTO:
                weight_format(name)

    @property
    def keeps_floats(self) -> bool:
        """True if all packed weights are floats. Stored integers are then dequantised."""
        return self.weight_format != AUTO and weight_format(self.weight_format).is_float

    def zero_points(self, fmt: str) -> bool:
        """Returns True if floats that are quantised to the format ``fmt`` get zero points."""
        return self.asymmetric and weight_format(fmt).zero != 0


@dataclass(frozen=True, slots=True)
class _Plan:
    """Describes how a parameter is packed: the target format, and whether stored integers are kept."""

    format: str
    group: int
    stored: Scheme | None
    """The format of the checkpoint's integers, if the packed weight keeps them. None means that the weight is read as
    floats, and that integers of the checkpoint are dequantised.
    """

    @property
    def is_static(self) -> bool:
        """True if the layer quantises its inputs with scales and offsets from the checkpoint's calibration."""
        return self.stored is not None and self.stored.static and weight_format(self.format).quantises_activations

    @property
    def holds_bias(self) -> bool:
        """True if the offsets that are added to the integer sums include the layer's bias.

        The layer then has no other bias.
        """
        return self.is_static and self.stored is not None and self.stored.sums_hold_bias


def pack_weight(fmt: str, values: Array, blob: npt.NDArray[np.uint8], **options: Any) -> None:
    """Packs ``values`` into ``blob`` with ``agent.kernels``. A lock lets only one thread pack at a time."""
    with _packing_lock:
        kernels.pack_weight(fmt, values, blob, **options)


class LinearPacker:
    """Packs linear layers for the kernels, one parameter after another, and reuses its scratch memory."""

    def __init__(self, packing: Packing, source: WeightSource, dtype: str) -> None:
        self._packing = packing
        self._source = source
        self._dtype = dtype
        self._scratch = np.empty(0, np.uint8)

    def check(self, spec: WeightSpec) -> None:
        """Raises ConfigError or CheckpointError if the parameter ``spec`` cannot be packed. Reads no values."""
        if spec.kind != "plain":
            for each in _each_weight(spec):
                self._plan(each)

    def pack(self, spec: WeightSpec) -> Array:
        """Returns a packed parameter, uint8 [bytes].

        A parameter of several experts has the packed weights of all experts, equally long and aligned.
        """
        if spec.input_spans:
            return self._pack_parts(spec)
        if spec.head_rows is not None:
            return self._pack_heads(spec, spec.head_rows)
        weights = _each_weight(spec)
        sizes = [self._blob_bytes(each) for each in weights]
        stride = max(sizes) if len(sizes) == 1 else aligned(max(sizes))
        blob = weight_blob(stride * len(weights))
        for index, each in enumerate(weights):
            self._pack_into(each, blob[index * stride : (index + 1) * stride])
        return blob

    def _pack_parts(self, spec: WeightSpec) -> Array:
        """Returns a blob of several packed weights, one for each range of inputs in ``spec.input_spans``.

        Each of them equals the packed weight of an agent that has only these inputs. Only the first has the bias.
        """
        plan, bias = self._plan(spec), self._bias(spec)
        values, dtype = self._floats(spec, plan)
        sizes = [
            packed_weight_bytes(plan.format, len(values), len(span), plan.group, biased=bias is not None and index == 0)
            for index, span in enumerate(spec.input_spans)
        ]
        begins = list(accumulate(map(aligned, sizes), initial=CACHE_LINE_BYTES))
        blob = weight_blob(begins[-1])
        for index, (span, begin, size) in enumerate(zip(spec.input_spans, begins, sizes, strict=False)):
            pack_weight(
                plan.format,
                np.ascontiguousarray(values[:, span.slice]),
                blob[begin : begin + size],
                group=plan.group,
                asymmetric=self._packing.zero_points(plan.format),
                source_dtype=dtype,
                bias=bias if index == 0 else None,
            )
        join_weight_parts(blob, len(sizes))
        return blob

    def _pack_heads(self, spec: WeightSpec, heads: HeadRows) -> Array:
        """Packs a separate weight of floats for each head. The packed weights are equally long and aligned."""
        plan = self._plan(spec)
        values, dtype = self._floats(spec, plan)
        stacked = values.reshape(heads.heads, heads.stride, -1)[:, heads.rows.slice]
        columns, depth = stacked.shape[:0:-1] if heads.transposed else stacked.shape[1:]
        stride = aligned(packed_weight_bytes(plan.format, columns, depth))
        blob = weight_blob(stride * heads.heads)
        for index, head in enumerate(stacked):
            pack_weight(
                plan.format,
                np.ascontiguousarray(head.T if heads.transposed else head),
                blob[index * stride : (index + 1) * stride],
                source_dtype=dtype,
            )
        return blob

    def _blob_bytes(self, spec: WeightSpec) -> int:
        plan, (columns, depth) = self._plan(spec), spec.shape
        biased = bool(spec.bias) and not plan.holds_bias
        return packed_weight_bytes(plan.format, columns, depth, plan.group, biased=biased, static_inputs=plan.is_static)

    def _pack_into(self, spec: WeightSpec, blob: npt.NDArray[np.uint8]) -> None:
        plan, gated = self._plan(spec), spec.kind == "gated_linear"
        bias = None if plan.holds_bias else self._bias(spec)
        if plan.stored is None:
            values, dtype = self._floats(spec, plan)
            pack_weight(
                plan.format,
                values,
                blob,
                group=plan.group,
                gated=gated,
                activation=spec.activation,
                asymmetric=self._packing.zero_points(plan.format),
                source_dtype=dtype,
                bias=bias,
            )
        else:
            joined = self._join(spec, plan)
            pack_weight(
                plan.format,
                joined.values,
                blob,
                group=plan.group,
                gated=gated,
                activation=spec.activation,
                source_dtype=self._dtype,
                scales=joined.scales,
                zeros=joined.zeros,
                bias=bias,
                static_inputs=joined.inputs,
            )

    def _bias(self, spec: WeightSpec) -> Array | None:
        """Reads the bias of a linear layer as float32, without rounding, or returns None if it has no bias."""
        if not spec.bias:
            return None
        bias = np.empty(sum(part.shape[0] for part in spec.bias), np.float32)
        for part, rows in rows_of(spec.bias):
            self._source.read_into(part.name, bias[rows], "float32")
        return bias

    def _plan(self, spec: WeightSpec) -> _Plan:
        stored, wanted = self._stored_scheme(spec), self._packing.weight_format
        if spec.float32:
            return _Plan("float32", 0, None)
        if spec.head_rows is not None:
            # MLA (latent attention) multiplies these weights head by head. These weights stay floats: they are small,
            # and integers would cost much quality.
            return _Plan(self._dtype, 0, None)
        if self._packing.keeps_floats or (stored is None and wanted == AUTO):
            return _Plan(self._dtype, 0, None)
        if stored is not None and spec.input_spans:
            raise ConfigError(
                f"parallel_config.sum_parts: tensor {spec.parts[0].name} is stored as {stored.format}; quantised "
                "weights cannot be divided; use weight_format bf16, a model of floats, or sum_parts 1"
            )
        if stored is None:
            fmt = (spec.parameter == OUTPUT_LAYER and self._packing.output_format) or wanted
            return _Plan(fmt, self._packing.group if weight_format(fmt).has_groups else 0, None)
        if wanted != AUTO and wanted not in formats_of_stored(stored.format):
            raise ConfigError(
                f"model_config.weight_format = {wanted}: tensor {spec.parts[0].name} is stored as {stored.format}; "
                f"use auto, {stored.format} or bf16, or a model of floats"
            )
        return _Plan(stored.format if wanted == AUTO else wanted, stored.group, stored)

    def _stored_scheme(self, spec: WeightSpec) -> Scheme | None:
        """Returns the format of the stored integers of a parameter, or None if floats are stored.

        Raises CheckpointError if the tensors of the parameter have different formats.
        """
        schemes = [self._source.scheme(part) for part in spec.parts]
        for part, scheme in zip(spec.parts, schemes, strict=True):
            if scheme != schemes[0]:
                raise CheckpointError(
                    f"tensor {part.name} is stored as {scheme or 'floats'}, {spec.parts[0].name} as "
                    f"{schemes[0] or 'floats'}; the two are one parameter ({spec.parameter}) and must agree"
                )
        return schemes[0]

    def _floats(self, spec: WeightSpec, plan: _Plan) -> tuple[Array, str]:
        """Reads all rows of a parameter as floats. Returns the floats and the name of their type.

        If the weight will be quantised, the floats keep the type of the checkpoint, so that quantisation is the only
        rounding.
        """
        kept = {self._source.float_dtype(part.name) for part in spec.parts}
        quantised_here = not weight_format(plan.format).is_float
        dtype = (kept.pop() if len(kept) == 1 else "float32") if quantised_here else plan.format
        dtype = dtype or self._dtype
        values = self._memory(spec.shape, STORAGE_DTYPES[dtype])
        for part, rows in rows_of(spec.parts):
            self._source.read_into(part.name, values[rows], dtype)
        return values, dtype

    def _join(self, spec: WeightSpec, plan: _Plan) -> QuantizedTensor:
        """Reads all tensors of a parameter, such as q, k and v, and joins them to one quantised tensor."""
        assert plan.stored is not None, "floats are not joined here"
        values = self._memory(spec.shape, np.dtype(plan.stored.weights.storage))
        tensors = []
        for part, rows in rows_of(spec.parts):
            tensor = self._source.read_quantised(part)
            if tensor.group_of_input is not None:
                raise CheckpointError(
                    f"tensor {part.name}: its groups are not consecutive inputs (GPTQ's desc_act), which the kernels "
                    "cannot read; set model_config.weight_format = bf16 to dequantise it"
                )
            values[rows] = tensor.values
            kept = replace(tensor, values=values[rows])
            tensors.append(kept if plan.is_static else without_inputs(kept, part.name))
        scales = np.concatenate([each.scales for each in tensors])
        found = [each.inputs for each in tensors if each.inputs is not None]
        inputs = joined_inputs(found, spec) if plan.is_static else None
        return QuantizedTensor(plan.stored, values, scales, _joined_zeros(tensors), inputs=inputs)

    def _memory(self, shape: tuple[int, ...], storage: Any) -> Array:
        """Returns uninitialised scratch memory, valid until the next call.

        All parameters use the same memory, because the system takes long to allocate new pages.
        """
        num_bytes = int(np.prod(shape)) * np.dtype(storage).itemsize
        if self._scratch.size < num_bytes:
            self._scratch = np.empty(0, np.uint8)
            self._scratch = allocate((num_bytes // 4 + 1,), "float32").view(np.uint8)
        memory: Array = self._scratch[:num_bytes].view(storage).reshape(shape)
        return memory


def _each_weight(spec: WeightSpec) -> list[WeightSpec]:
    """Returns the weights of which a parameter consists: one for each expert, or the parameter itself."""
    return [spec.expert(index) for index in range(spec.experts)] if spec.experts else [spec]


def without_inputs(tensor: QuantizedTensor, name: str) -> QuantizedTensor:
    """Converts a W8A8 weight, whose layer quantises its inputs with calibrated scales, to a weight for float inputs.

    The scales of ``tensor`` include the calibrated scale of the inputs, and the scales of the result do not. A tensor
    without calibrated scales (``inputs`` is None) is returned unchanged. Raises CheckpointError if the inputs have
    different scales, because an output has only one scale.
    """
    if tensor.inputs is None:
        return tensor
    tensor.check_describes_layer(name)
    inverses = tensor.inputs.inverses
    if (inverses != inverses[0]).any():
        raise CheckpointError(
            f"tensor {name}: its inputs have different scales; use model_config.weight_format auto, int8 or bf16"
        )
    return replace(tensor, scales=tensor.scales * inverses[0], inputs=None)


def joined_inputs(found: Sequence[StaticInputs], spec: WeightSpec) -> StaticInputs:
    """Joins the calibrated scales and offsets for quantising inputs (W8A8) of several tensors, such as q, k and v.

    The tensors form one parameter and have the same inputs. So their input scales and input offsets must be equal.
    Otherwise raises CheckpointError. The offsets that are added to the integer sums are concatenated.
    """
    first = found[0]
    for part, each in zip(spec.parts, found, strict=True):
        if (each.inverses != first.inverses).any() or (each.offsets != first.offsets).any():
            raise CheckpointError(
                f"tensor {part.name}: its input_scale or input_offset is not that of {spec.parts[0].name}, and the "
                f"two have the same inputs; set model_config.weight_format = bf16 to dequantise them"
            )
    return replace(first, sum_offsets=np.concatenate([each.sum_offsets for each in found]))


def _joined_zeros(tensors: Sequence[QuantizedTensor]) -> npt.NDArray[np.uint8] | None:
    """Joins the zero points of tensors along the rows. Returns None if no tensor has stored zero points."""
    if all(each.zeros is None for each in tensors):
        return None
    zeros: list[npt.NDArray[np.uint8]] = [
        np.full(each.scales.shape, each.scheme.weights.zero, np.uint8) if each.zeros is None else each.zeros
        for each in tensors
    ]
    return np.concatenate(zeros)
