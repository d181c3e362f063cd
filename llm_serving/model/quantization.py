"""How a checkpoint's weights are quantised: ``quantization_config`` of its ``config.json``, read and checked.

Three families are taken: GPTQ, AWQ (the gemm layout) and compressed-tensors (int-quantized and pack-quantized). What
the tensors then look like is in ``docs/quantization.md``; this module reads no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llm_serving.errors import CheckpointError
from llm_serving.formats.gguf_header import read_gguf_uint32
from llm_serving.formats.json_object import read_json_object
from llm_serving.formats.typed_fields import TypedFields

MAX_CONFIG_BYTES = 1024 * 1024
MAX_GROUP = 65_536
INT8_FORMATS = ("int8", "int8_weight_only")
INT4_FORMATS = ("int4", "int4_weight_only")
"""Values of ``model_config.weight_format`` that keep such integers. ``weight_only``: activations stay floats. Native
operators have no other int4."""
MAX_WEIGHT_ONLY_SIZE = 65_535
"""WeightQuantBatchMatmul of the native operators: inputs and outputs of a layer, at most (docs/ascend.md)."""
_OLDER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where AutoGPTQ and AutoAWQ wrote the same values before ``config.json`` had a place for them."""

_GGUF_FILE_TYPES = {2: "int4", 7: "int8"}
"""llama.cpp's numbers for files that are mostly Q4_0 and mostly Q8_0."""
_GGUF_GROUP = 32
"""Weights of a block of either."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """The scheme of a checkpoint's quantised tensors. Which tensors are quantised, their names tell."""

    layout: str
    """``gptq``, ``awq``, ``int-quantized`` or ``pack-quantized``."""
    bits: int
    """4 or 8."""
    group: int
    """Inputs that share a scale; 0: a whole row does."""
    zeros_minus_one: bool = False
    """GPTQ's first format stores each zero point less one."""

    @property
    def weight_format(self) -> str:
        """``int8`` or ``int4``: what ``model_config.weight_format: auto`` means for such a checkpoint."""
        return "int4" if self.bits == 4 else "int8"


def checkpoint_quantization(folder: Path) -> Quantization | None:
    """Of a Hugging Face folder; None where nothing in it tells of integers. Raises CheckpointError."""
    file = folder / "config.json"
    found = read_quantization(_fields(file)) if file.exists() else None
    for name, method in _OLDER_FILES.items():
        if found is None and (folder / name).exists():
            found = _of_method(_fields(folder / name), method)
    return found


def stored_weight_format(folder: Path) -> str | None:
    """``int8`` or ``int4`` where most weights of a folder are such integers, a GGUF file's by what it says of itself;
    None for floats. Raises CheckpointError."""
    found = checkpoint_quantization(folder)
    if found is not None:
        return found.weight_format
    files = sorted(folder.glob("*.gguf"))
    if not files or any(folder.glob("*.safetensors")):
        return None
    file_type = read_gguf_uint32(files[0], "general.file_type")
    return None if file_type is None else _GGUF_FILE_TYPES.get(file_type)


def stored_weight_group(folder: Path) -> int:
    """Weights of a row that share a scale where a folder's weights are integers; 1: a whole row, or no integers."""
    found = checkpoint_quantization(folder)
    if found is not None:
        return found.group or 1
    return _GGUF_GROUP if stored_weight_format(folder) is not None else 1


def read_quantization(fields: TypedFields) -> Quantization | None:
    """``quantization_config`` of a ``config.json``, None without one. Raises naming file, key and value."""
    if "quantization_config" not in fields:
        return None
    scheme = fields.mapping("quantization_config")
    return _of_method(scheme, scheme.text("quant_method", "", ("gptq", "awq", "compressed-tensors")))


def _fields(file: Path) -> TypedFields:
    return TypedFields(str(file), read_json_object(file, MAX_CONFIG_BYTES, CheckpointError), CheckpointError)


def _of_method(fields: TypedFields, method: str) -> Quantization:
    if method == "gptq":
        return _gptq(fields)
    return _awq(fields) if method == "awq" else _compressed_tensors(fields)


def _gptq(fields: TypedFields) -> Quantization:
    bits = _bits(fields, "bits")
    if fields.boolean("is_marlin_format", False):
        raise fields.fail("is_marlin_format", "the Marlin layout is not supported; only gptq or gptq_v2")
    if "dynamic" in fields and fields.mapping("dynamic"):
        raise fields.fail("dynamic", "settings of single modules are not supported")
    key = "checkpoint_format" if "checkpoint_format" in fields else "format"
    version = fields.text(key, "gptq", ("gptq", "gptq_v2"))
    return Quantization("gptq", bits, _group(fields, "group_size"), zeros_minus_one=version == "gptq")


def _awq(fields: TypedFields) -> Quantization:
    """AutoAWQ writes ``bits`` and ``group_size``, older files ``w_bit`` and ``q_group_size``."""
    bits, group = (
        ("bits" if "bits" in fields else "w_bit"),
        ("group_size" if "group_size" in fields else "q_group_size"),
    )
    if fields.integer(bits, 4, 1, 32) != 4:
        raise fields.fail(bits, "is not supported; AWQ weights have 4 bits")
    fields.text("version", "gemm", ("gemm", "GEMM"))
    return Quantization("awq", 4, _group(fields, group))


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
    bits = _bits(weights, "num_bits")
    weights.text("type", "int", ("int",))
    if layout == "int-quantized" and bits != 8:
        raise weights.fail("num_bits", "is not supported in the format int-quantized; only 8")
    if bits == 8 and not weights.boolean("symmetric", True):
        raise weights.fail("symmetric", "8-bit weights with zero points are not supported")
    strategy = weights.text("strategy", "channel", ("channel", "group", "tensor"))
    return Quantization(layout, bits, _group(weights, "group_size") if strategy == "group" else 0)


def _check_activations(group: TypedFields) -> None:
    """Activations are floats, or int8 with a scale found per token as they come."""
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


def _bits(fields: TypedFields, key: str) -> int:
    bits = fields.integer(key, None, 1, 32)
    if bits not in (4, 8):
        raise fields.fail(key, "is not supported; only 4 or 8")
    return bits


def _group(fields: TypedFields, key: str) -> int:
    """0 for -1, which stands for a whole row."""
    group = fields.integer(key, -1, -1, MAX_GROUP)
    if group == 0 or (group > 0 and group % 8):
        raise fields.fail(key, "must be -1 or a multiple of 8")
    return max(group, 0)
