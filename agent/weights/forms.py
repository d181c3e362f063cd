"""Describes the forms of linear layers' weights: layout and types that MindSpore's native primitives require.

    form              primitive                           weight                         scales, offsets
    float             MatMul                              model_dtype [out, in]
    int8              DynamicQuantExt, QuantBatchMatmul   int8 [out, in]                 float32 [out]
    int8, static      QuantV2, QuantBatchMatmul           int8 [out, in]                 float32 [out]
    int8_weight_only  WeightQuantBatchMatmul, transposed  int8 [out, in]                 model_dtype [out] or
                                                                                         [out, groups]
    int4_weight_only  WeightQuantBatchMatmul              int4 [in, out], two in a byte  model_dtype [groups, out]

The name of a form states how the primitives compute. It may differ from the setting: ``weight_format: int4`` has the
form ``int4_weight_only``.

A static form has three more parameters:

- input_scale and input_offset, model_dtype [in]: QuantV2 quantises x to round(x * input_scale + input_offset).
- sum_offset, int32 [out], the bias of QuantBatchMatmul: the primitive adds it to the integer sums before it scales
  them. This removes the contribution of input_offset from the sums.

The weights of all experts of a layer are one weight [experts, in, out] of GroupedMatmulV4. With ``int8``, the primitive
DynamicQuantExt quantises the inputs before this product.

    form              weight               scales, offsets
    float             model_dtype
    int8              int8                 bfloat16 or float32 [experts, out]
    int8_weight_only  int8                 model_dtype [experts, out]
    int4_weight_only  int4, two in a byte  model_dtype [experts, groups, out]

The two weight-only forms always have offsets, because GroupedMatmulV4 requires them. The offsets are the zero points of
a checkpoint with one scale for each row. In all other cases they are zero.

Sources and limits: docs/ascend.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent.weights.layout import WeightSpec
from agent.weights.packed import OUTPUT_LAYER, Packing
from agent.weights.quantized import Scheme
from agent.weights.source import WeightSource
from llm_serving.errors import ConfigError
from llm_serving.model.number_formats import AUTO, GROUP_SIZES_TEXT, WeightFormat, weight_format
from llm_serving.model.quantization import MAX_WEIGHT_ONLY_SIZE

GROUP_MULTIPLE = 32
"""WeightQuantBatchMatmul requires a group size that is a multiple of this number and smaller than the number of inputs.
"""
FLOAT = "float"
"""Name of the form of weights that are floats of ``model_dtype``."""
_OTHER_GROUPS = f"another model_config.weight_group ({GROUP_SIZES_TEXT}), or int8"


@dataclass(frozen=True, slots=True)
class LinearForm:
    """The form in which a native primitive takes the weight of a linear layer: format, groups and offsets."""

    format: str = FLOAT
    """``FLOAT``, or the integer format of the weight that the primitive takes."""
    group: int = 0
    """Number of inputs that share a scale. 0 means all inputs."""
    has_offsets: bool = False
    stored: Scheme | None = None
    """The integer format and groups in which the checkpoint stores the weight. None means floats, which are quantised
    when they are loaded.
    """

    @property
    def is_float(self) -> bool:
        """True if the weight consists of floats of ``model_dtype``."""
        return self.format == FLOAT

    @property
    def weights(self) -> WeightFormat:
        """The description of this form's integer format (``llm_serving.model.number_formats``).

        Raises UnknownFormatError if the weight consists of floats.
        """
        return weight_format(self.format)

    @property
    def quantises_activations(self) -> bool:
        """True if the activations are also quantised, so that integers are multiplied by integers."""
        return not self.is_float and self.weights.quantises_activations

    @property
    def is_static(self) -> bool:
        """True if the activations are quantised with scales and offsets from the checkpoint's calibration."""
        return self.quantises_activations and self.stored is not None and self.stored.static

    @property
    def holds_bias(self) -> bool:
        """True if the offsets that are added to the integer sums include the layer's bias.

        The layer then has no other bias.
        """
        return self.is_static and self.stored is not None and self.stored.sums_hold_bias


@dataclass(frozen=True, slots=True)
class LinearForms:
    """The forms of a model's weights: one form for all linear layers, one for the output layer, one for experts."""

    layers: LinearForm = LinearForm()
    output: LinearForm = LinearForm()
    experts: LinearForm = LinearForm()

    def check_type(self, dtype: str) -> None:
        """Raises ConfigError if the primitives of a form do not support activations of type ``dtype``.

        Static forms need bfloat16. With float32 scales, a bias, and no scale for each token, QuantBatchMatmul can only
        return bfloat16. For float16 it requires packed 64-bit scales with fewer digits (aclnnTransQuantParamV2).
        This project cannot check packed scales, so it does not support float16 here.
        """
        if dtype != "bfloat16" and (self.layers.is_static or self.output.is_static):
            raise ConfigError(
                f"model_config.model_dtype = {dtype} with op_table native: layers with static inputs (W8A8) need "
                "bfloat16; use model_dtype bfloat16, weight_format auto (floats), or op_table fused (CPU)"
            )


def scale_type(form: LinearForm, dtype: str, *, of_experts: bool) -> str:
    """Returns the type of a weight's scales that the primitive requires for activations of ``dtype``."""
    if not form.quantises_activations:
        return dtype
    return "bfloat16" if of_experts and dtype == "bfloat16" else "float32"


def linear_forms(specs: Sequence[WeightSpec], source: WeightSource, packing: Packing) -> LinearForms:
    """Chooses the forms of a model's weights in the graph: number format, groups and offsets (``LinearForm``).

    The choice depends on the settings ``packing`` and on the types of the tensors in ``source``, whose values are not
    read.

    The output layer keeps floats if its weight is the embedding, or if the vocabulary has more than
    ``MAX_WEIGHT_ONLY_SIZE`` tokens. With int4, it also keeps floats if the number of tokens is odd. Raises ConfigError
    if the primitives do not support a format.
    """
    if packing.weight_format == AUTO or packing.keeps_floats:
        return LinearForms()
    found: dict[str, LinearForm] = {}
    for spec in specs:
        if spec.kind == "plain" or spec.packed_only or spec.float32 or spec.head_rows is not None:
            continue
        form = _expert_form(spec, source, packing) if spec.experts else _form(spec, source, packing)
        place = "output" if spec.parameter == OUTPUT_LAYER else "experts" if spec.experts else "layers"
        if found.setdefault(place, form) != form:
            raise _error(
                packing,
                f"{spec.parameter} is stored in another form than earlier {'experts' if spec.experts else 'layers'}, "
                "and the native graph has one form for all; use auto, which dequantises, or op_table fused (CPU)",
            )
    return LinearForms(**found)


def _wanted(packing: Packing) -> WeightFormat:
    """Returns the weight format in which the native primitives compute, for example ``int4_weight_only`` for int4."""
    return weight_format(packing.weight_format).on("native")


def _stored(spec: WeightSpec, source: WeightSource, packing: Packing) -> Scheme | None:
    """Returns the integer format and groups of a stored weight, or None if it is stored as floats.

    Raises ConfigError if the tensors of the weight are stored in different formats, or if the primitives cannot use the
    stored integers.
    """
    schemes = {source.scheme(part) for part in spec.parts}
    if len(schemes) > 1:
        raise _error(packing, f"the parts of {spec.parameter} are stored in different formats; use auto")
    stored = schemes.pop()
    if stored is not None and stored.format != _wanted(packing).stored_as:
        raise _error(packing, f"tensor {spec.parts[0].name} is stored as {stored.format}; use {stored.format} or auto")
    if stored is not None and stored.static and spec.experts and _wanted(packing).quantises_activations:
        raise _error(
            packing,
            f"tensor {spec.parts[0].name} has static inputs (W8A8), which GroupedMatmulV4 does not support; use auto, "
            "which dequantises, or op_table fused (CPU)",
        )
    return stored


def _form(spec: WeightSpec, source: WeightSource, packing: Packing) -> LinearForm:
    wanted, (columns, depth) = _wanted(packing), spec.shape
    stored, is_output = _stored(spec, source, packing), spec.parameter == OUTPUT_LAYER
    if wanted.quantises_activations:
        if stored is not None and stored.group:
            raise _error(
                packing,
                f"QuantBatchMatmul has one scale for each output, and tensor {spec.parts[0].name} has {stored}; "
                f"use {wanted.stored_as}_weight_only",
            )
        return LinearForm(wanted.name, stored=stored)
    fills_bytes = columns % wanted.values_per_byte == 0
    if is_output and stored is None and (not fills_bytes or max(columns, depth) > MAX_WEIGHT_ONLY_SIZE):
        return LinearForm()
    if max(columns, depth) > MAX_WEIGHT_ONLY_SIZE:
        raise _error(
            packing,
            f"{spec.parameter} is {columns} x {depth}; WeightQuantBatchMatmul takes at most {MAX_WEIGHT_ONLY_SIZE}; "
            f"{_remedy(stored, 'int8 or auto')}",
        )
    group = stored.group if stored is not None else packing.group if wanted.has_groups else 0
    if group and (group % GROUP_MULTIPLE or group >= depth):
        raise _error(
            packing,
            f"{spec.parameter} has groups of {group} of its {depth} inputs; WeightQuantBatchMatmul takes multiples of "
            f"{GROUP_MULTIPLE} that are smaller than the inputs; {_remedy(stored, _OTHER_GROUPS)}",
        )
    if not fills_bytes:
        raise _error(packing, f"{spec.parameter} has {columns} outputs; {_bytes_text(wanted, stored)}")
    return LinearForm(wanted.name, group, wanted.zero != 0 and stored is not None, stored)


def _expert_form(spec: WeightSpec, source: WeightSource, packing: Packing) -> LinearForm:
    """Returns the form of a parameter with the weights of all experts of a layer.

    Raises ConfigError if GroupedMatmulV4 does not support the form.
    """
    wanted, (columns, depth) = _wanted(packing), spec.expert(0).shape
    stored = _stored(spec, source, packing)
    group = stored.group if stored is not None else packing.group if wanted.has_groups else 0
    if max(columns, depth) > MAX_WEIGHT_ONLY_SIZE:
        raise _error(
            packing,
            f"expert {spec.parameter} is {columns} x {depth}; GroupedMatmulV4 takes at most {MAX_WEIGHT_ONLY_SIZE}; "
            "use auto",
        )
    if spec.bias and wanted.quantises_activations:
        raise _error(
            packing,
            f"the experts of {spec.parameter} have biases, which GroupedMatmulV4 does not add to products of int8 "
            f"activations; use {wanted.stored_as}_weight_only or auto",
        )
    if not wanted.has_groups and group:
        raise _error(
            packing,
            f"GroupedMatmulV4 has one scale for each output of {wanted.stored_as} weights, and tensor "
            f"{spec.parts[0].name} has {stored}; use auto, which dequantises",
        )
    if group and (group % GROUP_MULTIPLE or depth % group):
        raise _error(
            packing,
            f"{spec.parameter} has groups of {group} of an expert's {depth} inputs; GroupedMatmulV4 takes multiples of "
            f"{GROUP_MULTIPLE} that divide the inputs; {_remedy(stored, _OTHER_GROUPS)}",
        )
    if columns % wanted.values_per_byte:
        problem = f"an expert of {spec.parameter} has {columns} outputs; {_bytes_text(wanted, stored)}"
        raise _error(packing, problem)
    return LinearForm(wanted.name, group, not wanted.quantises_activations, stored)


def _bytes_text(wanted: WeightFormat, stored: Scheme | None) -> str:
    """Returns a text for an error message: the limit of formats with several values in a byte, and the remedy."""
    limit = f"{wanted.values_per_byte} {wanted.stored_as} values share a byte and must fill it"
    return f"{limit}; {_remedy(stored, 'int8 or auto')}"


def _remedy(stored: Scheme | None, of_floats: str) -> str:
    """Returns the remedy for the error that a primitive does not take a weight. ``of_floats`` is the remedy for stored
    floats.

    Stored integers keep their format and groups, so only floats can take their place.
    """
    return "use auto, which dequantises" if stored is not None else f"use {of_floats}"


def _error(packing: Packing, problem: str) -> ConfigError:
    return ConfigError(f"model_config.weight_format = {packing.weight_format} with op_table native: {problem}")
