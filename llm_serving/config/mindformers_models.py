"""Checks whether MindFormers' classes (``model_type: mindformers``) can serve a model. Does not import MindFormers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math

from llm_serving.config.config import Config
from llm_serving.config.source import RawConfig
from llm_serving.model.families import Experts

MODEL_TYPE = "mindformers"
VERSION = "1.9"
LLAMA, QWEN3_MOE = "LlamaForCausalLM", "Qwen3MoeForCausalLM"
ARCHITECTURES = (LLAMA, "Qwen2ForCausalLM", "Qwen3ForCausalLM", QWEN3_MOE)
"""Architectures that MindFormers' classes can serve. ``agent/mindformers/families.py`` has the classes."""
_INSTALL = "install it with `make setup-mindformers` or `pip install 'llm-serving[mindformers]'`"


def check_mindformers(raw: RawConfig, config: Config) -> None:
    """Raises ConfigError if the config asks for MindFormers' classes, but they cannot compute the model correctly."""
    if config.model_config.model_type != MODEL_TYPE:
        return
    key, wanted = "model_config.model_type", config.model_config.weight_format
    if wanted not in ("auto", "bf16"):
        problem = "MindFormers' linear layers have float weights; use auto, which converts stored integers to floats"
        raise raw.error("model_config.weight_format", wanted, problem)
    for name in ("tensor_parallel", "pipeline_parallel"):
        agents: int = getattr(config.parallel_config, name)
        if agents > 1:
            problem = "MindFormers' models are not split over agents; use 1, or data_parallel for whole replicas"
            raise raw.error(f"parallel_config.{name}", agents, problem)
    problem = _missing_part(config) or _missing_package()
    if problem:
        raise raw.error(key, MODEL_TYPE, problem)


def check_op_table(raw: RawConfig, op_table: str) -> None:
    """Raises ConfigError unless the op table is ``native``: MindFormers' models call MindSpore's primitives."""
    if op_table != "native":
        problem = "with model_type mindformers use native or auto: its models call MindSpore's primitives"
        raise raw.error("model_config.op_table", op_table, problem)


def rotary_positions(config: Config) -> int:
    """Returns the number of positions in the model's rotary tables, at least the maximum length of a sequence.

    MindFormers' models need more positions if the type of the rotary scaling is ``llama3`` or ``yarn``. With
    ``llama3``, MindFormers' Llama needs one position more than the trained context has. With ``yarn``, MindFormers'
    Llama needs the positions of the trained context, and MindFormers' Qwen models need
    ``original_max_position_embeddings`` x ``factor``.
    """
    scaling, longest = config.shape.rope_scaling, config.max_model_len
    if config.model_config.model_type != MODEL_TYPE or scaling is None or scaling.type not in ("llama3", "yarn"):
        return longest
    trained = scaling.original_max_position_embeddings
    if config.shape.architecture == LLAMA:
        return max(longest, trained + 1 if scaling.type == "llama3" else trained)
    return math.ceil(trained * scaling.factor)


def _missing_part(config: Config) -> str:
    """Returns an error text about a feature of the model that MindFormers lacks, or an empty text."""
    shape = config.shape
    if shape.architecture not in ARCHITECTURES:
        return f"serves {', '.join(ARCHITECTURES)}; this is a {shape.architecture}: use model_type dyn"
    if shape.sliding_window and shape.sliding_window < config.max_model_len:
        return (
            f"MindFormers ignores sliding_window = {shape.sliding_window}, and a sequence may have "
            f"{config.max_model_len} tokens: lower pa_config.decode_seq_length, or use model_type dyn"
        )
    if shape.architecture == LLAMA and shape.head_dim * shape.num_attention_heads != shape.hidden_size:
        return (
            f"MindFormers' Llama has a head size of hidden size / heads, and this model {shape.head_dim}: use "
            "model_type dyn"
        )
    if shape.output_bias:
        return "MindFormers' output layer of attention has no bias, and attention_bias asks for one: use model_type dyn"
    return _missing_scaling(config) or (_missing_experts(shape.experts) if shape.architecture == QWEN3_MOE else "")


def _missing_scaling(config: Config) -> str:
    """Returns an error text about a rotary scaling that MindFormers lacks, or an empty text.

    MindFormers 1.9 makes the rotary tables of Llama in ``modules.layers.FreqsMgr``, and of Qwen in
    ``rope_utils.get_rope``, which supports only YaRN.
    """
    scaling, is_llama = config.shape.rope_scaling, config.shape.architecture == LLAMA
    if scaling is None or (is_llama and scaling.type == "linear"):
        return ""
    if is_llama and scaling.type == "dynamic":
        return "MindFormers' Llama would ignore rope_scaling dynamic, it has linear, llama3, yarn: use model_type dyn"
    if not is_llama and scaling.type != "yarn":
        return f"MindFormers' Qwen models have only rope_scaling yarn, and this is {scaling.type}: use model_type dyn"
    if scaling.factor < 1:
        return (
            f"MindFormers accepts no factor below 1 with rope_scaling {scaling.type}, and it is {scaling.factor:g}: "
            "use model_type dyn"
        )
    if scaling.type != "yarn":
        return ""
    if not scaling.truncate:
        return "MindFormers' yarn rounds its bounds to whole dimensions, and truncate is false: use model_type dyn"
    if scaling.factor == 1 and scaling.attention_factor != 1:
        return (
            f"MindFormers' yarn has no attention_factor if factor is 1, and it is {scaling.attention_factor:g}: use "
            "model_type dyn"
        )
    if rotary_positions(config) < config.max_model_len:
        return (
            f"MindFormers' yarn ends at original_max_position_embeddings x factor = {rotary_positions(config)} tokens, "
            f"and a sequence may have {config.max_model_len}: lower pa_config.decode_seq_length, or use model_type dyn"
        )
    return ""


def _missing_experts(experts: Experts | None) -> str:
    """Returns an error text about a property of the model's experts that MindFormers ignores, or an empty text."""
    if experts is None or experts.dense_layers:
        layers = "all layers" if experts is None else f"layers {', '.join(map(str, experts.dense_layers))}"
        return (
            f"MindFormers has experts in every layer, and here {layers} have none (mlp_only_layers, "
            "decoder_sparse_step): use model_type dyn"
        )
    if experts.normalised and experts.per_token == 1:
        return (
            "MindFormers ignores norm_topk_prob if num_experts_per_tok is 1, and a token's only weight would not be 1: "
            "use model_type dyn"
        )
    return ""


def _missing_package() -> str:
    """Returns an error text if MindFormers is not installed in the tested version, or an empty text."""
    spec = importlib.util.find_spec("mindformers")
    if spec is None or spec.origin is None:
        return f"the package mindformers is not installed; {_INSTALL}"
    try:
        version = importlib.metadata.version("mindformers")
    except importlib.metadata.PackageNotFoundError:
        return f"the package mindformers is installed without a version; {_INSTALL}"
    if not version.startswith(f"{VERSION}."):
        return f"mindformers {version} is installed, and only {VERSION} is supported; {_INSTALL}"
    return ""
