"""Reads the ``context`` section and the model's sizes from a YAML of MindFormers, and lists the keys without effect."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from llm_serving.config.graph_kernel_flags import read_flags
from llm_serving.config.mindformers_unused import find_unused
from llm_serving.config.source import UnusedSetting
from llm_serving.errors import ConfigError
from llm_serving.formats.strict_yaml import read_yaml_mapping
from llm_serving.formats.typed_fields import TypedFields, short_repr
from llm_serving.model.rope import MAX_POSITIONS, RopeScaling, read_rope_scaling
from llm_serving.model.shape import (
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    MAX_LAYERS,
    MAX_VOCAB_SIZE,
    ModelShape,
    check_head_sizes,
    head_dim_of,
    shape_of_fields,
)

_DTYPES = ("float16", "bfloat16", "float32")

_SIZES_IN_FOLDER = ("DeepseekV2Config", "DeepseekV3Config")
"""Model types for which a MindFormers YAML has other keys than ``config.json``. The sizes of these models are read from
the model folder.
"""
_LLAMA_SIZES = ("type", "hidden_size", "num_layers", "num_heads", "vocab_size")

KEYS_READ = {
    "context.mode": "0, graph mode; 1 has no effect, because the graphs are always compiled",
    "context.device_target": "`CPU`, `Ascend` or `auto`; used if `model_config.device_target` is null",
    "context.device_id": "device of the first agent, with MindFormers",
    "context.enable_graph_kernel": "fuse operators of the graph; see docs/ascend.md",
    "context.graph_kernel_flags": "flags of MindSpore's fusion on an Ascend; an unknown flag is refused",
    "context.max_call_depth": "limit of nested calls in a graph",
    "context.max_device_memory": 'device memory the model may take, as in `"58GB"`; the memory plan of an Ascend',
    "context.save_graphs": "true or 1 to 3: write the compiled graphs to files; 0 by default",
    "context.save_graphs_path": 'folder of the graphs of `save_graphs`; `"./graph"` by default',
    "model.arch.type": "`LlamaForCausalLM`",
    "model.model_config.type": "`LlamaConfig`; `DeepseekV2Config` and `DeepseekV3Config`: `model_path` has the sizes",
    "model.model_config.hidden_size": "size of the residual stream",
    "model.model_config.num_layers": "decoder layers",
    "model.model_config.num_heads": "query heads",
    "model.model_config.n_kv_heads": "key-value heads; `num_heads` by default",
    "model.model_config.head_dim": "size of a head; `hidden_size / num_heads` by default",
    "model.model_config.intermediate_size": "MLP size; by default computed from the next two keys, as in MindFormers",
    "model.model_config.multiple_of": "the MLP size is rounded up to a multiple of it; 256 by default",
    "model.model_config.ffn_dim_multiplier": "factor on the MLP size",
    "model.model_config.vocab_size": "tokens in the vocabulary",
    "model.model_config.seq_length": "maximum length of a sequence",
    "model.model_config.max_position_embedding": "the same; replaces `seq_length`",
    "model.model_config.rms_norm_eps": "epsilon of RMSNorm; 1e-5 by default",
    "model.model_config.theta": "base of the rotary angles; 10000 by default",
    "model.model_config.extend_method": '`"None"`; `"PI"`: positions are divided by `scaling_factor`; `"LLAMA3"`',
    "model.model_config.scaling_factor": "factor of `extend_method`; for LLAMA3 a mapping as in `config.json`",
    "model.model_config.tie_word_embeddings": "output projection is the embedding; false by default",
    "model.model_config.bos_token_id": "first token",
    "model.model_config.eos_token_id": "end token or tokens",
    "model.model_config.pad_token_id": "padding token",
    "model.model_config.qkv_has_bias": "true for a Qwen2; the sizes are then those of `model_path`",
    "model.model_config.compute_dtype": "replaces a `model_dtype` of `DataType.FLOAT32` with native operators",
    "model.model_config.param_init_type": "checked; `model_config.model_dtype` decides",
    "model.model_config.params_dtype": "checked; `model_config.model_dtype` decides",
    "pretrained_model_dir": "model folder, if `model_config.model_path` is null",
}
"""The keys that are read from a MindFormers YAML, with their meaning. The sizes of the model have the names of
MindFormers' ``LlamaConfig``. But if ``model.model_config`` has ``num_hidden_layers`` or ``num_attention_heads``, this
section is read like a ``config.json`` of Hugging Face.
"""


@dataclass(frozen=True, slots=True)
class MindSporeContext:
    """Section ``context`` of a MindFormers YAML: settings of MindSpore that apply before a graph is compiled."""

    device_target: str | None = None
    device_id: int = 0
    enable_graph_kernel: bool | None = None
    """None if the file does not have this key. ``Config.fuses_operators`` has the default."""
    graph_kernel_flags: str = ""
    max_call_depth: int = 10_000
    max_device_memory_bytes: int | None = None
    save_graphs: int = 0
    """How many of the compiled graphs MindSpore writes to files, from 0 (none) to 3 (all)."""
    save_graphs_path: str = "./graph"


@dataclass(frozen=True, slots=True)
class MindFormersFile:
    """The values that the server reads from a MindFormers YAML."""

    file: str
    """Path of the YAML."""
    context: MindSporeContext
    shape: ModelShape | None
    """Sizes of the model. None if the file has no ``model.model_config``, or one without sizes."""
    compute_dtype: str | None = None
    model_folder: str | None = None
    """Value of the key ``pretrained_model_dir``. None if the file does not have this key."""
    unused: tuple[UnusedSetting, ...] = ()

    def unused_on(self, device: str) -> tuple[UnusedSetting, ...]:
        """Returns the settings that have no effect on this device, ``CPU`` or ``Ascend``."""
        flags = self.context.graph_kernel_flags
        if device != "CPU" or not flags:
            return self.unused
        reason = "flags of MindSpore's fusion on an Ascend; a CPU fuses fixed chains of operators"
        return (*self.unused, UnusedSetting(self.file, "context.graph_kernel_flags", short_repr(flags), reason))


def read_mindformers_yaml(path: Path) -> MindFormersFile:
    """Reads a MindFormers YAML. Raises ConfigError with file, key and value if a key has a wrong type or value."""
    document = TypedFields(str(path), read_yaml_mapping(path), ConfigError)
    model = document.mapping("model")
    sizes = model.mapping("model_config") if "model_config" in model else None
    return MindFormersFile(
        str(path),
        _context(document.mapping("context")),
        None if sizes is None else _shape(sizes, model.mapping("arch")),
        sizes.text("compute_dtype", "", ("", *_DTYPES)) or None if sizes is not None else None,
        document.text("pretrained_model_dir", "") or None,
        find_unused(document, KEYS_READ),
    )


def _context(fields: TypedFields) -> MindSporeContext:
    fields.integer("mode", 0, 0, 1)
    target = fields.text("device_target", "auto", ("auto", "CPU", "Ascend")) if "device_target" in fields else None
    return MindSporeContext(
        device_target=target,
        device_id=fields.integer("device_id", 0, 0, 255),
        enable_graph_kernel=fields.boolean("enable_graph_kernel", False) if "enable_graph_kernel" in fields else None,
        graph_kernel_flags=read_flags(fields, "graph_kernel_flags"),
        max_call_depth=fields.integer("max_call_depth", 10_000, 1, 1_000_000),
        max_device_memory_bytes=_memory(fields, "max_device_memory"),
        save_graphs=_save_graphs(fields),
        save_graphs_path=fields.text("save_graphs_path", "./graph"),
    )


def _save_graphs(fields: TypedFields) -> int:
    """Returns MindSpore's level for writing graphs to files, from 0 to 3. Also accepts true as 1 and false as 0."""
    value = fields.value("save_graphs")
    return int(value) if isinstance(value, bool) else fields.integer("save_graphs", 0, 0, 3)


def _memory(fields: TypedFields, key: str) -> int | None:
    """Returns the number of bytes of a size in MindSpore's notation, for example ``"58GB"``.

    None if the key is absent.
    """
    if key not in fields:
        return None
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)GB", fields.text(key, ""))
    if match is None or float(match[1]) == 0:
        raise fields.fail(key, 'must be a size above 0 like "58GB"')
    return int(float(match[1]) * 1024**3)


def _shape(fields: TypedFields, arch: TypedFields) -> ModelShape | None:
    """Returns the model's sizes. The YAML states them with the keys of MindFormers' Llama, or with those of
    ``config.json``.

    Returns None if ``model.model_config`` does not state the sizes, for example for Qwen2. The model folder then has
    them.
    """
    if "num_hidden_layers" in fields or "num_attention_heads" in fields:
        return _shape_in_hugging_face_names(fields)
    has_biases = fields.boolean("qkv_has_bias", False)  # true for a Qwen2, whose sizes are in the model folder
    if has_biases or fields.value("type") in _SIZES_IN_FOLDER or not any(key in fields for key in _LLAMA_SIZES):
        _check_types(fields)
        return None
    return _llama_shape(fields, arch)


def _shape_in_hugging_face_names(fields: TypedFields) -> ModelShape:
    _check_types(fields)
    if "seq_length" in fields:
        fields.integer("seq_length", None, 1, MAX_POSITIONS)
    return shape_of_fields(fields, TypedFields(fields.source, {}, ConfigError), activations=("silu", "swiglu"))


def _check_types(fields: TypedFields) -> None:
    for key in ("compute_dtype", "params_dtype"):
        fields.text(key, "float16", _DTYPES)


def _llama_shape(fields: TypedFields, arch: TypedFields) -> ModelShape:
    fields.text("type", "LlamaConfig", ("LlamaConfig",))
    hidden = fields.integer("hidden_size", None, 1, MAX_HIDDEN_SIZE)
    heads = fields.integer("num_heads", None, 1, MAX_HEADS)
    vocab_size = fields.integer("vocab_size", None, 1, MAX_VOCAB_SIZE)
    for key in ("compute_dtype", "param_init_type", "params_dtype"):
        fields.text(key, "float16", _DTYPES)
    longest = fields.integer("seq_length", 2048, 1, MAX_POSITIONS)
    longest = fields.integer("max_position_embedding", longest, 1, MAX_POSITIONS)
    first, pad = fields.token_ids("bos_token_id", vocab_size), fields.token_ids("pad_token_id", vocab_size)
    shape = ModelShape(
        architecture=arch.text("type", "LlamaForCausalLM", ("LlamaForCausalLM",)),
        hidden_size=hidden,
        intermediate_size=_intermediate_size(fields, hidden),
        num_layers=fields.integer("num_layers", None, 1, MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("n_kv_heads", heads, 1, MAX_HEADS),
        head_dim=head_dim_of(fields, hidden, heads, "num_heads"),
        vocab_size=vocab_size,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5, 0.0, 1.0),
        rope_theta=fields.number("theta", 10_000.0, 0.0, 1e12),
        rope_scaling=_rope_scaling(fields, longest),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        max_position_embeddings=longest,
        hidden_act="silu",
        attention_bias=False,
        bos_token_id=first[0] if first else None,
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        pad_token_id=pad[0] if pad else None,
    )
    check_head_sizes(fields, shape, "num_heads", "n_kv_heads")
    return shape


def _intermediate_size(fields: TypedFields, hidden: int) -> int:
    """Returns the MLP size, computed as in MindFormers: 2/3 of 4 x hidden size x ``ffn_dim_multiplier``, rounded up to
    a multiple of ``multiple_of``.
    """
    if "intermediate_size" in fields:
        return fields.integer("intermediate_size", None, 1, 8 * MAX_HIDDEN_SIZE)
    size, multiple = 4 * hidden, fields.integer("multiple_of", 256, 1, MAX_HIDDEN_SIZE)
    if "ffn_dim_multiplier" in fields:
        size = int((fields.number("ffn_dim_multiplier", None, 0.0, 64.0) + 0.01) * size)
    size = int(2 * size / 3)
    return -(-size // multiple) * multiple


def _rope_scaling(fields: TypedFields, trained: int) -> RopeScaling | None:
    """Returns the rotary scaling that ``extend_method`` names. None means no scaling.

    ``PI`` divides positions by ``scaling_factor``, and ``LLAMA3`` scales as in Llama 3. ``trained`` is the length of
    the sequences that the model was trained with, in tokens.
    """
    method = fields.text("extend_method", "None", ("None", "PI", "LLAMA3"))
    if method == "LLAMA3":
        return read_rope_scaling(fields.mapping("scaling_factor").with_value("type", "llama3"), trained)
    factor = fields.number("scaling_factor", 1.0, 0.0, 1e6)
    return RopeScaling("linear", factor) if method == "PI" and factor != 1.0 else None
