"""Reads the description of a folder that msModelSlim or golden-stick quantized: the scheme of every tensor.

The sources for the format of these files are msModelSlim (``docs/zh/user_guide/quantization_formats/ascendv1.md`` and
``AscendV1Saver``), vllm-ascend (``vllm_ascend/quantization``) and vllm-mindspore (``golden_stick``). To add a scheme,
add an entry to ``_SCHEMES`` and its tensors to ``agent/weights/model_slim.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llm_serving.errors import CheckpointError
from llm_serving.formats.safetensors_header import tensor_shapes
from llm_serving.formats.small_files import read_json_object
from llm_serving.formats.typed_fields import TypedFields, short_repr

MAX_DESCRIPTION_BYTES = 64 * 1024 * 1024
"""Maximum size of the description file."""
MAX_GROUP = 65_536
"""Maximum number of weights with one scale."""
FLOAT = "FLOAT"
"""Scheme of tensors that are not quantized."""
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class TensorScheme:
    """A scheme of quantized weights."""

    name: str
    """The name in the description, for example ``W8A8_DYNAMIC``."""
    bits: int
    """Bits of a weight."""
    has_groups: bool = False
    """True if ``group_size`` inputs share a scale. Otherwise all inputs of an output share a scale."""
    static: bool = False
    """True if the folder has a calibrated scale with which the layer's inputs are quantized."""


_SCHEMES = {
    each.name: each
    for each in (
        TensorScheme("W8A8", bits=8, static=True),
        TensorScheme("W8A8_DYNAMIC", bits=8),
        TensorScheme("W8A16", bits=8),
        TensorScheme("W4A16", bits=4, has_groups=True),
    )
}
_MODEL_SLIM, _GOLDEN_STICK = "quant_model_description.json", "quantization_description.json"
"""File name of the description in folders of msModelSlim, and in folders of golden-stick."""
_MOST_NAMED = 3
"""Maximum number of tensors that an error message names."""


@dataclass(frozen=True)
class Description:
    """The contents of a description file that loading needs."""

    schemes: Mapping[str, TensorScheme]
    """The scheme of each quantized weight, by the weight's name (``... .weight``). Other weights are floats."""
    bits: int
    group: int
    """Number of inputs that share a scale. 0: all inputs of an output share a scale."""
    sums_hold_bias: bool = True
    """True if ``quant_bias`` of scheme W8A8 contains the layer's bias, as msModelSlim writes it."""


def read_description(folder: Path) -> Description | None:
    """Returns the description of a model folder, or None if the folder has none.

    Raises CheckpointError if the folder needs a scheme that this program does not support. Reads no values of weights.
    """
    for name in (_MODEL_SLIM, _GOLDEN_STICK):
        if (folder / name).exists():
            values = read_json_object(folder / name, MAX_DESCRIPTION_BYTES, CheckpointError)
            fields = TypedFields(str(folder / name), values, CheckpointError)
            return _description(fields, folder, sums_hold_bias=name == _MODEL_SLIM)
    return None


def _description(fields: TypedFields, folder: Path, *, sums_hold_bias: bool) -> Description | None:
    _refuse_other_parts(fields)
    found = _weights(fields)
    if not found:
        return None
    bits = {each.bits for each in found.values()}
    if len(bits) > 1:
        examples = {each.bits: f"{name} = {each.name}" for name, each in found.items()}
        raise CheckpointError(
            f"{fields.source}: weights of {' and '.join(map(str, sorted(bits)))} bits in one folder are not supported "
            f"({', '.join(examples[each] for each in sorted(bits))}); quantize all layers with one number of bits"
        )
    grouped = [name for name, each in found.items() if each.has_groups]
    group = 0
    if grouped:
        group = _group(fields) if "group_size" in fields else _stored_group(folder, grouped[0])
    return Description(found, bits.pop(), group, sums_hold_bias)


def _stored_group(folder: Path, weight: str) -> int:
    """Returns the group size of a quantized folder, found from the shapes of the tensors of one weight.

    It is needed for older descriptions, which do not state the group size. A weight with groups has the shape [outputs,
    inputs], or [outputs / 2, inputs] if two outputs share a byte. Its scales have the shape [outputs, groups]. Returns
    0 if the shapes do not fit each other. The reader of weights then refuses the folder.
    """
    shapes = tensor_shapes(folder, (weight, f"{weight}_scale"))
    stored, scales = shapes.get(weight, ()), shapes.get(f"{weight}_scale", ())
    if len(stored) != 2 or len(scales) != 2 or scales[1] < 2:
        return 0
    group, rest = divmod(stored[1], scales[1])
    fits = stored[0] in (scales[0], scales[0] / 2) and rest == 0 and group % 8 == 0
    return group if fits else 0


def _weights(fields: TypedFields) -> dict[str, TensorScheme]:
    """Returns the scheme of each quantized weight.

    Raises CheckpointError for an unknown scheme, and names its tensors.
    """
    found: dict[str, TensorScheme] = {}
    unknown: dict[str, list[str]] = {}
    names = fields.keys()
    for name in names:
        value = fields.value(name)
        if "." not in name or value == FLOAT:  # a name without a dot is a setting of the folder
            continue
        scheme = _SCHEMES.get(value) if isinstance(value, str) else None
        if scheme is None:
            unknown.setdefault(short_repr(value), []).append(name)
        elif name.endswith(_WEIGHT):
            found[name] = scheme
    if unknown:
        listed = "; ".join(f"{value} for {_some(names)}" for value, names in unknown.items())
        raise CheckpointError(
            f"{fields.source}: the quantization scheme is not supported: {listed}; supported are {', '.join(_SCHEMES)} "
            f"and {FLOAT}; quantize the model with one of them, or serve its float folder"
        )
    return found


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more tensors" if more > 0 else "")


def _refuse_other_parts(fields: TypedFields) -> None:
    """Raises CheckpointError if something other than weights is quantized, or activations must be rotated."""
    for key, meaning in _OTHER_PARTS.items():
        if fields.value(key):
            raise fields.fail(key, f"{meaning} is not supported; quantize only the weights of linear layers")
    if "metadata" in fields and fields.mapping("metadata").value("quarot"):
        raise fields.fail("metadata", "rotation of activations at run time (quarot) is not supported")


_OTHER_PARTS = {
    "kv_quant_type": "a KV cache with stored scales",
    "kv_cache_type": "a KV cache with stored scales",
    "fa_quant_type": "quantized attention",
    "reduce_quant_type": "quantized communication",
}


def _group(fields: TypedFields) -> int:
    group = fields.integer("group_size", 0, 0, MAX_GROUP)
    if group % 8:
        raise fields.fail("group_size", "must be 0 (a scale for each output) or a multiple of 8")
    return group
