"""How the native primitives take the weights of linear layers.

    form               primitive                          weight                      scales, offsets
    float              MatMul                             model_dtype [out, in]
    int8               DynamicQuantExt, QuantBatchMatmul  int8 [out, in]              float32 [out]
    int8_weight_only   WeightQuantBatchMatmul,            int8 [out, in]              model_dtype [out], with groups
                       transposed                                                     [out, groups]
    int4               WeightQuantBatchMatmul             int4 [in, out], two a byte  model_dtype [groups, out]

``int4_weight_only`` is another name of ``int4`` here, whose activations stay floats.

Those of all experts of a layer are one weight of GroupedMatmulV4:

    float                                                 model_dtype [experts, in, out]
    int8               behind DynamicQuantExt             int8, the same              [experts, out], bfloat16 for
                                                                                      bfloat16, else float32
    int8_weight_only                                      int8, the same              model_dtype [experts, out]
    int4                                                  int4, two a byte, the same  model_dtype [experts, groups, out]

The last two have offsets always, for the primitive asks for them; they are zeros but for whole rows with zero points.

Sources and limits: docs/ascend.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent.weights.layout import WeightSpec
from agent.weights.packed import FLOAT_FORMATS, INT4, OUTPUT_LAYER, Packing
from agent.weights.quantized import Scheme
from agent.weights.source import WeightSource
from llm_serving.errors import ConfigError
from llm_serving.model.quantization import INT4_FORMATS, MAX_WEIGHT_ONLY_SIZE

GROUP_MULTIPLE = 32
"""WeightQuantBatchMatmul: groups are multiples of this, and smaller than the inputs."""


@dataclass(frozen=True, slots=True)
class LinearForm:
    """Of one linear layer's weight."""

    format: str = "float"
    """``float``, ``int8``, ``int8_weight_only`` or ``int4``."""
    group: int = 0
    """Inputs that share a scale; 0: all."""
    has_offsets: bool = False
    stored: Scheme | None = None
    """How the checkpoint has it; None: as floats."""


@dataclass(frozen=True, slots=True)
class LinearForms:
    """Of a model: one form for the linear layers of all blocks, one for the output to the vocabulary, and one for the
    experts of all blocks."""

    layers: LinearForm = LinearForm()
    output: LinearForm = LinearForm()
    experts: LinearForm = LinearForm()


def scale_type(form: LinearForm, dtype: str, *, of_experts: bool) -> str:
    """The type of the scales of integers that multiply activations of ``dtype``."""
    if form.format != "int8":
        return dtype
    return "bfloat16" if of_experts and dtype == "bfloat16" else "float32"


def linear_forms(specs: Sequence[WeightSpec], source: WeightSource, packing: Packing) -> LinearForms:
    """The forms that ``packing`` asks for, of weights that are stored as ``source`` has them. Reads no values.

    An output to a vocabulary larger than ``MAX_WEIGHT_ONLY_SIZE`` stays floats where the primitive has that limit, as
    does one to an odd vocabulary in int4, and one that is the embedding always. Raises ConfigError where the primitives
    cannot do what is asked.
    """
    if packing.weight_format in ("auto", *FLOAT_FORMATS):
        return LinearForms()
    found: dict[str, LinearForm] = {}
    for spec in specs:
        if spec.kind == "plain" or spec.packed_only or spec.float32:
            continue
        form = _expert_form(spec, source, packing) if spec.experts else _form(spec, source, packing)
        place = "output" if spec.parameter == OUTPUT_LAYER else "experts" if spec.experts else "layers"
        if found.setdefault(place, form) != form:
            raise _error(
                packing,
                f"{spec.parameter} is stored otherwise than the {'experts' if spec.experts else 'linear layers'} "
                f"before it, and the native graph has one form for all; use auto, which multiplies out, or op_table "
                f"fused (CPU)",
            )
    return LinearForms(**found)


def _wanted(packing: Packing) -> str:
    """The name of the form."""
    return INT4 if packing.weight_format in INT4_FORMATS else packing.weight_format


def _stored(spec: WeightSpec, source: WeightSource, packing: Packing) -> Scheme | None:
    """How all parts of a weight are stored."""
    schemes = {source.scheme(part) for part in spec.parts}
    if len(schemes) > 1:
        raise _error(packing, f"the parts of {spec.parameter} are stored in different formats; use auto")
    stored = schemes.pop()
    if stored is not None and (stored.format == INT4) != (_wanted(packing) == INT4):
        raise _error(packing, f"tensor {spec.parts[0].name} is stored as {stored.format}; use {stored.format} or auto")
    return stored


def _form(spec: WeightSpec, source: WeightSource, packing: Packing) -> LinearForm:
    wanted, (columns, depth) = _wanted(packing), spec.shape
    stored, is_output = _stored(spec, source, packing), spec.parameter == OUTPUT_LAYER
    if wanted == "int8":
        if stored is not None and stored.group:
            raise _error(
                packing,
                f"QuantBatchMatmul has one scale an output, and tensor {spec.parts[0].name} has {stored}; use "
                f"int8_weight_only",
            )
        return LinearForm("int8", stored=stored)
    is_odd = wanted == INT4 and columns % 2 == 1
    if is_output and stored is None and (is_odd or max(columns, depth) > MAX_WEIGHT_ONLY_SIZE):
        return LinearForm()
    if max(columns, depth) > MAX_WEIGHT_ONLY_SIZE:
        raise _error(
            packing, f"{spec.parameter} is {columns} x {depth}; WeightQuantBatchMatmul takes {MAX_WEIGHT_ONLY_SIZE}"
        )
    group = stored.group if stored is not None else packing.group if wanted == INT4 else 0
    if group and (group % GROUP_MULTIPLE or group >= depth):
        raise _error(
            packing,
            f"{spec.parameter} has groups of {group} of its {depth} inputs; WeightQuantBatchMatmul takes multiples of "
            f"{GROUP_MULTIPLE} that are smaller than the inputs",
        )
    if is_odd:
        raise _error(packing, f"{spec.parameter} has {columns} outputs; two int4 share a byte, so they must be even")
    return LinearForm(wanted, group, wanted == INT4 and stored is not None, stored)


def _expert_form(spec: WeightSpec, source: WeightSource, packing: Packing) -> LinearForm:
    """Of the weights of all experts: the limits of GroupedMatmulV4."""
    wanted, (columns, depth) = _wanted(packing), spec.expert(0).shape
    stored = _stored(spec, source, packing)
    group = stored.group if stored is not None else packing.group if wanted == INT4 else 0
    if max(columns, depth) > MAX_WEIGHT_ONLY_SIZE:
        raise _error(
            packing,
            f"an expert of {spec.parameter} is {columns} x {depth}; GroupedMatmulV4 takes {MAX_WEIGHT_ONLY_SIZE}",
        )
    if wanted != INT4 and group:
        raise _error(
            packing,
            f"GroupedMatmulV4 has one scale an output where weights are int8, and tensor {spec.parts[0].name} has "
            f"{stored}; use auto, which multiplies out",
        )
    if group and (group % GROUP_MULTIPLE or depth % group):
        raise _error(
            packing,
            f"{spec.parameter} has groups of {group} of an expert's {depth} inputs; GroupedMatmulV4 takes multiples of "
            f"{GROUP_MULTIPLE} that divide the inputs",
        )
    if wanted == INT4 and columns % 2:
        raise _error(packing, f"an expert of {spec.parameter} has {columns} outputs; two int4 share a byte")
    return LinearForm(wanted, group, wanted != "int8", stored)


def _error(packing: Packing, problem: str) -> ConfigError:
    return ConfigError(f"model_config.weight_format = {packing.weight_format} with op_table native: {problem}")
