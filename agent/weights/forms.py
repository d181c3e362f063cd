"""How the native primitives take the weights of linear layers.

    form               primitive                          weight                      scales, offsets
    float              MatMul                             model_dtype [out, in]
    int8               DynamicQuantExt, QuantBatchMatmul  int8 [out, in]              float32 [out]
    int8_weight_only   WeightQuantBatchMatmul,            int8 [out, in]              model_dtype [out], with groups
                       transposed                                                     [out, groups]
    int4               WeightQuantBatchMatmul             int4 [in, out], two a byte  model_dtype [groups, out]

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
from llm_serving.quantization import MAX_WEIGHT_ONLY_SIZE

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
    """Of a model: one form for the linear layers of all blocks, and one for the output to the vocabulary."""

    layers: LinearForm = LinearForm()
    output: LinearForm = LinearForm()


def linear_forms(specs: Sequence[WeightSpec], source: WeightSource, packing: Packing) -> LinearForms:
    """The forms that ``packing`` asks for, of weights that are stored as ``source`` has them. Reads no values.

    An output to a vocabulary larger than ``MAX_WEIGHT_ONLY_SIZE`` stays floats where the primitive has that limit, and
    one that is the embedding always. Raises ConfigError where the primitives cannot do what is asked.
    """
    if packing.weight_format in ("auto", *FLOAT_FORMATS):
        return LinearForms()
    layers: LinearForm | None = None
    output = LinearForm()
    for spec in specs:
        if spec.kind == "plain" or spec.packed_only:
            continue
        if spec.experts or spec.float32:
            raise _error(packing, "experts have no quantised primitives here; use auto, or op_table fused (CPU)")
        form = _form(spec, source, packing)
        if spec.parameter == OUTPUT_LAYER:
            output = form
        elif layers is None:
            layers = form
        elif form != layers:
            raise _error(
                packing,
                f"{spec.parameter} is stored otherwise than the linear layers before it, and the native graph has one "
                f"form for all; use auto, which multiplies out, or op_table fused (CPU)",
            )
    return LinearForms(layers or LinearForm(), output)


def _form(spec: WeightSpec, source: WeightSource, packing: Packing) -> LinearForm:
    wanted, (columns, depth) = packing.weight_format, spec.shape
    schemes = {source.scheme(part) for part in spec.parts}
    if len(schemes) > 1:
        raise _error(packing, f"the parts of {spec.parameter} are stored in different formats; use auto")
    stored = schemes.pop()
    is_output = spec.parameter == OUTPUT_LAYER
    if stored is not None and (stored.format == INT4) != (wanted == INT4):
        raise _error(packing, f"tensor {spec.parts[0].name} is stored as {stored.format}; use {stored.format} or auto")
    if wanted == "int8":
        if stored is not None and stored.group:
            raise _error(
                packing,
                f"QuantBatchMatmul has one scale an output, and tensor {spec.parts[0].name} has {stored}; use "
                f"int8_weight_only",
            )
        return LinearForm("int8", stored=stored)
    if max(columns, depth) > MAX_WEIGHT_ONLY_SIZE:
        if is_output and stored is None:
            return LinearForm()
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
    if wanted == INT4 and columns % 2:
        raise _error(packing, f"{spec.parameter} has {columns} outputs; two int4 share a byte, so they must be even")
    return LinearForm(wanted, group, wanted == INT4 and stored is not None, stored)


def _error(packing: Packing, problem: str) -> ConfigError:
    return ConfigError(f"model_config.weight_format = {packing.weight_format} with op_table native: {problem}")
