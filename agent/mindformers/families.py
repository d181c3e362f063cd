"""Maps each ``architectures`` entry to a MindFormers model and the settings of this model. Does not import MindFormers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from llm_serving.config import Config
from llm_serving.config.mindformers_models import rotary_positions
from llm_serving.errors import AgentStartError
from llm_serving.model.rope import RopeScaling

Settings = dict[str, object]


def gpt_settings(config: Config) -> Settings:
    """Returns the arguments of the configuration classes of MindFormers' newer models.

    The arguments are the sizes from ``config.json``, the maximum sequence length, and the types of the arithmetic. The
    softmax has type float32. All other arguments that state a type are ``model_dtype``. MindFormers nevertheless
    computes norms and rotary tables in float32, and rounds only their results to ``model_dtype``.
    """
    shape, dtype = config.shape, config.model_config.model_dtype
    settings: Settings = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "attention_bias": shape.attention_bias,
        "hidden_act": shape.hidden_act,
        "max_position_embeddings": config.max_model_len,
        "block_size": config.pa_config.block_size,
        "num_blocks": config.pa_config.num_blocks,
        "params_dtype": dtype,
        "compute_dtype": dtype,
        "layernorm_compute_dtype": dtype,
        "rotary_dtype": dtype,
        "softmax_compute_dtype": "float32",
    }
    return settings if shape.rope_scaling is None else {**settings, "rope_scaling": _yarn(shape.rope_scaling)}


def moe_settings(config: Config) -> Settings:
    """Returns the arguments of MindFormers' configuration class for a mixture of experts, with a float32 router."""
    experts = config.shape.experts
    assert experts is not None, "the server refuses a model without experts"
    return {
        **gpt_settings(config),
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalised,
        "router_dense_type": "float32",
    }


def llama_settings(config: Config) -> Settings:
    """Returns the arguments of ``LlamaConfig``.

    MindFormers' "parallel decoding" is turned on, because the model then takes positions, masks and query lengths as
    inputs. Chunks of prompts and mixed steps need these inputs.
    """
    shape, dtype = config.shape, config.model_config.model_dtype
    settings: Settings = {
        "batch_size": 1,
        "seq_length": config.max_model_len,
        "max_position_embedding": rotary_positions(config),
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_layers": shape.num_layers,
        "num_heads": shape.num_attention_heads,
        "n_kv_heads": shape.num_key_value_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "theta": shape.rope_theta,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "block_size": config.pa_config.block_size,
        "num_blocks": config.pa_config.num_blocks,
        "param_init_type": dtype,
        "compute_dtype": dtype,
        "layernorm_compute_type": dtype,
        "rotary_dtype": dtype,
        "softmax_compute_type": "float32",
        "use_past": True,
        "is_dynamic": True,
        "use_flash_attention": True,
        "parallel_decoding_params": {"parallel_decoding": "la"},
    }
    return settings if shape.rope_scaling is None else settings | _llama_scaling(shape.rope_scaling)


def _yarn(scaling: RopeScaling) -> Settings:
    """Returns the argument ``rope_scaling`` of MindFormers' newer models, for YaRN.

    These models take ``coeff``, and compute the attention factor as ``coeff`` * ln(``factor``) + 1.
    """
    assert scaling.type == "yarn", "the server refuses all other types"
    return {
        "rope_type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "coeff": _magnitude(scaling),
    }


def _llama_scaling(scaling: RopeScaling) -> Settings:
    """Returns the arguments of ``LlamaConfig`` for rotary scaling.

    Linear scaling uses ``extend_method: PI`` (position interpolation). PI divides positions by the factor, linear
    scaling divides frequencies, and both give the same angles. MindFormers' own linear scaling does not accept a number
    as its factor.
    """
    if scaling.type == "linear":
        return {"extend_method": "PI", "scaling_factor": scaling.factor}
    trained = scaling.original_max_position_embeddings
    common = {"factor": scaling.factor, "original_max_position_embeddings": trained}
    if scaling.type == "llama3":
        bounds = {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        return {"extend_method": "LLAMA3", "scaling_factor": {**common, **bounds}}
    assert scaling.type == "yarn", "the server refuses all other types"
    # MindFormers multiplies cosines by (0.1 * mscale * ln(factor) + 1) / (0.1 * mscale_all_dim * ln(factor) + 1). With
    # the values below, this quotient is attention_factor.
    bounds = {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    magnitude = {"mscale": _magnitude(scaling) / 0.1, "mscale_all_dim": 0.0}
    return {"extend_method": "YARN", "scaling_factor": {**common, **bounds, **magnitude}}


def _magnitude(scaling: RopeScaling) -> float:
    """Returns the coefficient c for which c * ln(``factor``) + 1 is the attention factor of the checkpoint.

    MindFormers takes c as a setting. If ``factor`` is 1, c has no effect, and the result is the default 0.1.
    """
    return 0.1 if scaling.factor == 1 else (scaling.attention_factor - 1) / math.log(scaling.factor)


@dataclass(frozen=True, slots=True)
class InferenceModel:
    """The classes for a model family, by their full names: configuration and network in MindFormers 1.9, and this
    project's adapter.
    """

    config: str
    network: str
    adapter: str = "agent.mindformers.gpt.GptAdapter"
    settings: Callable[[Config], Settings] = gpt_settings


_LLAMA, _QWEN2, _QWEN3, _QWEN3_MOE = (f"mindformers.models.{name}" for name in ("llama", "qwen2", "qwen3", "qwen3_moe"))

INFERENCE_MODELS = {
    "LlamaForCausalLM": InferenceModel(
        f"{_LLAMA}.llama_config.LlamaConfig",
        f"{_LLAMA}.llama.LlamaForCausalLM",
        "agent.mindformers.llama.LlamaAdapter",
        llama_settings,
    ),
    "Qwen2ForCausalLM": InferenceModel(
        f"{_QWEN2}.configuration_qwen2.Qwen2Config", f"{_QWEN2}.modeling_qwen2_infer.InferenceQwen2ForCausalLM"
    ),
    "Qwen3ForCausalLM": InferenceModel(
        f"{_QWEN3}.configuration_qwen3.Qwen3Config", f"{_QWEN3}.modeling_qwen3_infer.InferenceQwen3ForCausalLM"
    ),
    "Qwen3MoeForCausalLM": InferenceModel(
        f"{_QWEN3_MOE}.configuration_qwen3_moe.Qwen3MoeConfig",
        f"{_QWEN3_MOE}.modeling_qwen3_moe_infer.InferenceQwen3MoeForCausalLM",
        settings=moe_settings,
    ),
}
"""The MindFormers classes of each architecture. A test compares the keys with the architectures that the config
accepts.
"""


def inference_model(architecture: str) -> InferenceModel:
    """Returns the classes for an architecture. Raises AgentStartError if MindFormers has no model for it."""
    if architecture not in INFERENCE_MODELS:
        known = ", ".join(INFERENCE_MODELS)
        raise AgentStartError(f"no MindFormers model for architecture {architecture!r}; there are: {known}")
    return INFERENCE_MODELS[architecture]
