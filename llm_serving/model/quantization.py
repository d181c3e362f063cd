"""Reads and checks how a checkpoint is quantized: ``quantization_config`` of ``config.json``, or the header of a GGUF.

Accepted are GPTQ, AWQ (the gemm layout), compressed-tensors (int-quantized and pack-quantized), folders of msModelSlim
and golden-stick (``llm_serving.model.quant_description``) and GGUF. Folders of 8-bit floats become floats when they
are read (``llm_serving.model.float8``). Experts of 4-bit floats become int8 (``llm_serving.model.mxfp4``).
``docs/quantization.md`` has a table. No tensor is read.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from llm_serving.errors import CheckpointError
from llm_serving.formats.small_files import read_json_object
from llm_serving.formats.typed_fields import TypedFields
from llm_serving.gguf.header import read_header
from llm_serving.gguf.place import find_gguf
from llm_serving.model.float8 import FLOAT8, Float8Blocks, read_float8
from llm_serving.model.mxfp4 import MXFP4, MXFP4_GROUP, read_mxfp4
from llm_serving.model.number_formats import STORED_FORMATS, WeightFormat, stored_format
from llm_serving.model.quant_description import MAX_GROUP, Description, read_description

MAX_CONFIG_BYTES = 1024 * 1024
"""Maximum size of ``config.json``."""
MAX_WEIGHT_ONLY_SIZE = 65_535
"""Maximum number of inputs, and of outputs, of MindSpore's primitive WeightQuantBatchMatmul."""
GGUF_GROUP = 32
"""Number of consecutive weights of a quantised GGUF tensor that share a scale."""
GGUF_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Maps the names of GGUF's float types to the names of weight formats."""
_OLDER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Names of the files in which older versions of AutoGPTQ and AutoAWQ wrote the scheme, each with the quantization
method.
"""


@dataclass(frozen=True, slots=True)
class Quantization:
    """The scheme of a checkpoint's quantised tensors.

    Which tensors are quantised follows from the tensors' names, or from ``description``.
    """

    layout: str
    """Layout of the tensors: ``gptq``, ``awq``, ``int-quantized``, ``pack-quantized`` or ``model-slim``."""
    bits: int
    group: int
    """Number of inputs that share a scale. 0: all inputs of an output share a scale."""
    zeros_minus_one: bool = False
    """If True, the checkpoint stores each zero point minus one, as GPTQ's first format does."""
    description: Description | None = None
    """The scheme of every tensor, in the layout ``model-slim``. None in all other layouts."""

    @property
    def format(self) -> WeightFormat:
        """The weight format that is used for this checkpoint if ``model_config.weight_format`` is ``auto``."""
        return stored_format(self.bits)


def checkpoint_quantization(folder: Path) -> Quantization | None:
    """Returns the quantization of a Hugging Face folder, or None for float weights. Raises CheckpointError."""
    file = folder / "config.json"
    found = read_quantization(_fields(file)) if file.exists() else None
    for name, method in _OLDER_FILES.items():
        if found is None and (folder / name).exists():
            found = _of_method(_fields(folder / name), method)
    return found or _described(folder)


def _described(folder: Path) -> Quantization | None:
    """Returns the quantization of a folder with a description file, or None. Raises CheckpointError."""
    description = read_description(folder)
    if description is None:
        return None
    return Quantization("model-slim", description.bits, description.group, description=description)


def stored_weight_format(path: Path) -> str | None:
    """Returns the name of the integer format of a model folder or GGUF file, or None for float weights.

    Raises CheckpointError.
    """
    found = checkpoint_quantization(path)
    if found is not None:
        return found.format.name
    if has_mxfp4_experts(path):
        return "int8"
    file = find_gguf(path)
    return None if file is None else _gguf_format(file)


def _gguf_format(file: Path) -> str | None:
    """Returns the weight format in which most weights of a GGUF file are loaded, or None for float weights.

    If no weight format has the same integers as a GGUF type, weights of this type are loaded as int8.
    """
    sizes = Counter[str]()
    for each in read_header(file).tensors.values():
        if len(each.shape) > 1:
            sizes[each.type.name] += math.prod(each.shape)
    common = max(sizes, key=lambda name: sizes[name], default="F32")
    if common in GGUF_FLOATS:
        return None
    return next((each.name for each in STORED_FORMATS if each.gguf_type == common), "int8")


def stored_weight_group(path: Path) -> int:
    """Returns the number of inputs that share a scale in a model folder or GGUF file.

    It is 1 for floats, and if all inputs of an output share a scale.
    """
    found = checkpoint_quantization(path)
    if found is not None:
        return found.group or 1
    if has_mxfp4_experts(path):
        return MXFP4_GROUP
    return GGUF_GROUP if stored_weight_format(path) is not None else 1


def read_quantization(fields: TypedFields) -> Quantization | None:
    """Returns the scheme in ``quantization_config`` of a ``config.json``, or None for float weights.

    8-bit floats and the 4-bit floats of experts count as float weights. Errors name file, key and value.
    """
    if "quantization_config" not in fields:
        return None
    scheme = fields.mapping("quantization_config")
    method = scheme.text("quant_method", "", ("gptq", "awq", "compressed-tensors", FLOAT8, MXFP4))
    if method == FLOAT8:
        read_float8(scheme)
        return None
    if method == MXFP4:
        read_mxfp4(scheme)
        return None
    return _of_method(scheme, method)


def checkpoint_float8(folder: Path) -> Float8Blocks | None:
    """Returns the block size of a folder of 8-bit floats, or None for another folder. Raises CheckpointError."""
    fields = _stated_scheme(folder)
    return None if fields is None or fields.value("quant_method") != FLOAT8 else read_float8(fields)


def has_mxfp4_experts(path: Path) -> bool:
    """Returns whether a model folder says that its experts are MXFP4. False for a GGUF file. Raises CheckpointError."""
    fields = _stated_scheme(path)
    return fields is not None and fields.value("quant_method") == MXFP4


def _stated_scheme(folder: Path) -> TypedFields | None:
    file = folder / "config.json"
    return _fields(file).mapping("quantization_config") if file.exists() else None


def _fields(file: Path) -> TypedFields:
    return TypedFields(str(file), read_json_object(file, MAX_CONFIG_BYTES, CheckpointError), CheckpointError)


def _of_method(fields: TypedFields, method: str) -> Quantization:
    if method == "gptq":
        return _gptq(fields)
    return _awq(fields) if method == "awq" else _compressed_tensors(fields)


def _gptq(fields: TypedFields) -> Quantization:
    bits = _bits(fields, "bits", "gptq")
    if fields.boolean("is_marlin_format", False):
        raise fields.fail("is_marlin_format", "the Marlin layout is not supported; only gptq or gptq_v2")
    if "dynamic" in fields and fields.mapping("dynamic"):
        raise fields.fail("dynamic", "settings of single modules are not supported")
    key = "checkpoint_format" if "checkpoint_format" in fields else "format"
    version = fields.text(key, "gptq", ("gptq", "gptq_v2"))
    return Quantization("gptq", bits, _group(fields, "group_size"), zeros_minus_one=version == "gptq")


def _awq(fields: TypedFields) -> Quantization:
    """Reads AutoAWQ's keys ``bits`` and ``group_size``. Older files call them ``w_bit`` and ``q_group_size``."""
    bits = _bits(fields, "bits" if "bits" in fields else "w_bit", "awq", default=4)
    fields.text("version", "gemm", ("gemm", "GEMM"))
    return Quantization("awq", bits, _group(fields, "group_size" if "group_size" in fields else "q_group_size"))


def _compressed_tensors(fields: TypedFields) -> Quantization:
    layout = fields.text("format", "", ("int-quantized", "pack-quantized"))
    fields.text("quantization_status", "compressed", ("compressed",))
    for key in ("kv_cache_scheme", "transform_config"):
        if key in fields and (not isinstance(fields.value(key), dict) or fields.mapping(key)):
            raise fields.fail(key, "is not supported")
    if "sparsity_config" in fields:
        fields.mapping("sparsity_config").text("format", "dense", ("dense",))
    groups = fields.mapping("config_groups")
    names = groups.keys()
    if len(names) != 1:
        raise fields.fail("config_groups", "must be exactly one group, of every linear layer")
    group = groups.mapping(names[0])
    if group.names("targets") != ("Linear",):
        raise group.fail("targets", "is not supported; only ['Linear']")
    if "format" in group:
        group.text("format", layout, (layout,))
    if "output_activations" in group:
        raise group.fail("output_activations", "quantised outputs are not supported")
    _check_activations(group)
    return _compressed_weights(group.mapping("weights"), layout)


def _compressed_weights(weights: TypedFields, layout: str) -> Quantization:
    bits = _bits(weights, "num_bits", layout)
    weights.text("type", "int", ("int",))
    if stored_format(bits).zero == 0 and not weights.boolean("symmetric", True):
        raise weights.fail("symmetric", f"{bits}-bit weights with zero points are not supported")
    strategy = weights.text("strategy", "channel", ("channel", "group", "tensor"))
    return Quantization(layout, bits, _group(weights, "group_size") if strategy == "group" else 0)


def _check_activations(group: TypedFields) -> None:
    """Raises an error unless activations are floats, or int8 with one scale per token, computed at run time."""
    if "input_activations" not in group:
        return
    activations = group.mapping("input_activations")
    if not activations.boolean("dynamic", False):
        raise activations.fail("dynamic", "static scales of activations are not supported; only dynamic ones")
    activations.text("type", "int", ("int",))
    if activations.integer("num_bits", 8, 1, 32) != 8:
        raise activations.fail("num_bits", "is not supported; only 8")
    if not activations.boolean("symmetric", True):
        raise activations.fail("symmetric", "activations with zero points are not supported")
    activations.text("strategy", "token", ("token",))


def _bits(fields: TypedFields, key: str, layout: str, default: int | None = None) -> int:
    bits = fields.integer(key, default, 1, 32)
    known = sorted(each.bits for each in STORED_FORMATS if layout in each.layouts)
    if bits not in known:
        raise fields.fail(key, f"is not supported in the format {layout}; only {' or '.join(map(str, known))}")
    return bits


def _group(fields: TypedFields, key: str) -> int:
    """Returns the number of inputs that share a scale. -1 in the file means all inputs, for which 0 is returned."""
    group = fields.integer(key, -1, -1, MAX_GROUP)
    if group == 0 or (group > 0 and group % 8):
        raise fields.fail(key, "must be -1 or a multiple of 8")
    return max(group, 0)
