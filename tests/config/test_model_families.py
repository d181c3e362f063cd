"""Tests which keys of ``config.json`` each family reads in addition to a Llama's sizes, and which keys it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from llm_serving.errors import CheckpointError
from llm_serving.model.deepseek import LatentAttention, Routing
from llm_serving.model.families import FAMILIES, Experts
from llm_serving.model.gated_delta import GatedDelta
from llm_serving.model.gemma import Gemma
from llm_serving.model.rope import RopeScaling
from llm_serving.model.shape import ModelShape
from support.model_folders import write_model_folder

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
}  # fmt: skip


MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 6, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
V2 = {"architectures": ["DeepseekV2ForCausalLM"], **LATENT}
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], **LATENT, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 8, "head_dim": 32, "tie_word_embeddings": None,
}  # fmt: skip
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 6, "num_experts_per_tok": 2}
HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
HYBRID_DENSE = {"architectures": ["Qwen3_5ForCausalLM"], "layer_types": ["linear_attention", "full_attention"]}
HYBRID_EXPERTS = {**HYBRID, "architectures": ["Qwen3_5MoeForCausalLM"]}
NEEDED = {
    each["architectures"][0]: each  # type: ignore[index]
    for each in (MOE, MIXTRAL, V2, V3, GEMMA, GPT_OSS, HYBRID, HYBRID_DENSE, HYBRID_EXPERTS)
}


def shape_of(tmp_path: Path, **changes: Any) -> ModelShape:
    return ModelShape.from_hf_folder(write_model_folder(tmp_path / "model", **changes))


@pytest.mark.parametrize("architecture", [name for name, family in FAMILIES.items() if not family.vision])
def test_a_family_is_found_by_architecture_or_model_type(tmp_path: Path, architecture: str) -> None:
    needed = {key: value for key, value in NEEDED.get(architecture, {}).items() if key != "architectures"}
    assert shape_of(tmp_path, architectures=[architecture], **needed).architecture == architecture
    model_type = FAMILIES[architecture].model_type
    shape = shape_of(tmp_path / "type", remove=("architectures",), model_type=model_type, **needed)
    assert shape.architecture == architecture


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        shape_of(tmp_path, architectures=["GPT2LMHeadModel"])
    for architecture in FAMILIES:
        assert architecture in str(caught.value)


def test_biases_are_read(tmp_path: Path) -> None:
    qwen2 = shape_of(tmp_path / "qwen2", architectures=["Qwen2ForCausalLM"])
    assert (qwen2.attention_bias, qwen2.output_bias) == (True, False)
    llama, plain = shape_of(tmp_path / "llama", attention_bias=True), shape_of(tmp_path / "plain")
    assert (llama.attention_bias, llama.output_bias) == (True, True)
    assert (plain.attention_bias, plain.output_bias) == (False, False)
    assert qwen2.num_parameters - plain.num_parameters == 2 * (64 + 2 * 32)
    assert llama.num_parameters - plain.num_parameters == 2 * (64 + 2 * 32 + 64)


def test_query_key_norms_and_head_sizes_are_read(tmp_path: Path) -> None:
    qwen3 = shape_of(tmp_path / "stated", architectures=["Qwen3ForCausalLM"], head_dim=16)
    assert qwen3.query_key_norm
    assert qwen3.num_parameters - shape_of(tmp_path / "plain").num_parameters == 2 * 2 * 16
    assert shape_of(tmp_path / "default", architectures=["Qwen3ForCausalLM"]).head_dim == 128
    assert not shape_of(tmp_path / "qwen2", architectures=["Qwen2ForCausalLM"]).query_key_norm


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, [0, 0, 0, 0]),
        ("MistralForCausalLM", {}, [0, 0, 0, 0]),
        ("MistralForCausalLM", {"sliding_window": None}, [0, 0, 0, 0]),
        ("MistralForCausalLM", {"sliding_window": 8}, [8, 8, 8, 8]),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, [0, 0, 0, 0]),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, [0, 0, 0, 0]),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, [0, 0, 0, 8]),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [8, 0, 8, 0],
        ),
        ("Qwen3MoeForCausalLM", {**MOE, "sliding_window": 8, "use_sliding_window": True}, [8, 8, 8, 8]),
        ("MixtralForCausalLM", {**MIXTRAL, "sliding_window": 8}, [8, 8, 8, 8]),
        ("MixtralForCausalLM", {**MIXTRAL, "sliding_window": None}, [0, 0, 0, 0]),
    ],
)
def test_windows_are_read(tmp_path: Path, architecture: str, changes: dict[str, Any], windows: list[int]) -> None:
    values = {"num_hidden_layers": 4, **changes, "architectures": [architecture]}
    shape = shape_of(tmp_path, **values)
    assert [shape.window_of(layer) for layer in range(4)] == windows


def test_experts_are_read(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, **MOE, num_hidden_layers=4, mlp_only_layers=[0], decoder_sparse_step=2)
    assert shape.experts == Experts(8, 3, 48, normalised=False, dense_layers=(0, 2))
    assert [shape.has_experts(layer) for layer in range(4)] == [False, True, False, True]
    dense = 3 * 64 * 160
    attention = 2 * 64 * 64 + 2 * 64 * 32 + 2 * 16 + 2 * 64
    experts = 8 * 3 * 64 * 48 + 8 * 64
    assert shape.num_parameters == 4 * attention + 2 * dense + 2 * experts + 64 + 2 * 300 * 64
    normalised = shape_of(tmp_path / "normalised", **MOE, norm_topk_prob=True)
    assert normalised.experts == Experts(8, 3, 48, normalised=True)
    assert shape_of(tmp_path / "none", **MOE, mlp_only_layers=[0, 1]).experts is None
    mixtral = shape_of(tmp_path / "mixtral", **MIXTRAL, num_hidden_layers=4)
    assert mixtral.experts == Experts(6, 2, 160, normalised=True)
    assert mixtral.num_parameters == 4 * (attention - 2 * 16 + 6 * 3 * 64 * 160 + 6 * 64) + 64 + 2 * 300 * 64


def test_experts_of_qwen35_are_always_normalised_and_in_every_layer(tmp_path: Path) -> None:
    """Published folders have no ``intermediate_size``, because no layer has an ordinary MLP."""
    ignored = {"norm_topk_prob": False, "mlp_only_layers": [0]}
    shape = shape_of(tmp_path, **HYBRID_EXPERTS | ignored, remove=("intermediate_size",))
    assert shape.experts == Experts(8, 3, 48, normalised=True, shared_size=512, shared_gate=True)
    assert shape.intermediate_size == 48
    with pytest.raises(CheckpointError, match="intermediate_size"):
        shape_of(tmp_path / "dense", **HYBRID_DENSE, remove=("intermediate_size",))
    with pytest.raises(CheckpointError, match="intermediate_size"):
        shape_of(tmp_path / "some", **MOE, mlp_only_layers=[0], remove=("intermediate_size",))


def test_latent_attention_and_deepseeks_experts_are_read(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
    shape = shape_of(tmp_path, **V3, rope_scaling={**yarn, "mscale_all_dim": 1.0}, num_nextn_predict_layers=1)
    factor = (0.1 * math.log(40.0) + 1.0) ** 2
    assert shape.latent == LatentAttention(48, 32, 16, 8, 12, interleaved=True, score_factor=factor)
    assert (shape.head_dim, shape.rotary_dim, shape.value_dim, shape.num_extra_layers) == (24, 8, 12, 1)
    assert shape.rope_scaling is not None
    assert shape.rope_scaling.attention_factor == 1.0
    routing = Routing(sigmoid=True, groups=4, chosen_groups=2, corrected=True, factor=2.5)
    assert shape.experts == Experts(8, 3, 24, normalised=True, dense_layers=(0,), routing=routing, shared_size=48)
    attention = 64 * (48 + 40) + 48 * 4 * 24 + 32 * 4 * (16 + 12) + 4 * 12 * 64
    layers = 2 * (attention + 2 * 64 + 48 + 32) + 3 * 64 * 160 + 3 * 64 * (8 * 24 + 48) + 8 * 64 + 8
    assert shape.num_parameters == layers + 64 + 2 * 300 * 64
    lite = shape_of(tmp_path / "lite", **{**V2, "q_lora_rank": None, "routed_scaling_factor": 1.5})
    assert lite.latent == LatentAttention(0, 32, 16, 8, 12)
    assert lite.experts is not None
    assert lite.experts.routing == Routing(factor=1.5)
    grouped = {**V2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 3}
    found = shape_of(tmp_path / "grouped", **grouped).experts
    assert found is not None
    assert found.routing == Routing(groups=4, chosen_groups=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**V2, "kv_lora_rank": None}, "kv_lora_rank = null: must be an integer from 1"),
        ({**V2, "qk_rope_head_dim": 7}, "qk_rope_head_dim = 7: must be even"),
        ({**V2, "num_key_value_heads": 2}, "num_key_value_heads = 2: must be num_attention_heads = 4"),
        ({**V2, "attention_bias": True}, "attention_bias = True: is not supported"),
        ({**V2, "norm_topk_prob": True}, "norm_topk_prob = True: is not supported for DeepSeek V2"),
        ({**V2, "topk_method": "noaux_tc"}, "topk_method = 'noaux_tc': is not supported; only greedy or group_limited"),
        ({**V2, "scoring_func": "sigmoid"}, "scoring_func = 'sigmoid': is not supported; only softmax"),
        ({**V2, "moe_layer_freq": 2}, "moe_layer_freq = 2: is not supported; only 1"),
        ({**V2, "v_head_dim": 41}, "v_head_dim = 41: must be at most kv_lora_rank + qk_rope_head_dim = 40"),
        ({**V3, "topk_method": "greedy"}, "topk_method = 'greedy': is not supported; only noaux_tc"),
        ({**V3, "n_group": 3}, "n_group = 3: must divide the number of experts, n_routed_experts = 8"),
        ({**V3, "n_group": 8}, "n_group = 8: makes groups of 1 experts; the router needs at least 2"),
        ({**V3, "topk_group": 1}, "topk_group = 1: 1 groups have 2 experts; a token needs 3"),
        ({**V3, "n_group": None}, "n_group = null: must be an integer from 1 to 8"),
        ({**MOE, "num_experts": None}, "num_experts = null: must be an integer from 1"),
        ({**MOE, "num_experts_per_tok": 9}, "num_experts_per_tok = 9: must be from 1 to 8"),
        ({**MOE, "moe_intermediate_size": 0}, "moe_intermediate_size = 0: must be from 1"),
        ({**MIXTRAL, "num_local_experts": None}, "num_local_experts = null: must be an integer from 1"),
        ({**MOE, "mlp_only_layers": "0"}, "mlp_only_layers = '0': must be a list of layer numbers"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "num_experts": 8},
            "num_experts = 8: must not be above 1: Qwen2ForCausalLM has no experts",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]},
            "layer_types = ['full_attention']:",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["sliding_attention"] * 2},
            "layer_types = ['sliding_attention', 'sliding_attention']: has sliding_attention, but sliding_window is",
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.7},
            "partial_rotary_factor = 0.7: rotates 11 of 16 elements; it must be an even number",
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.1},
            "partial_rotary_factor = 0.1: rotates less than 2 of the 16 elements of a head",
        ),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [0.0] * 8},
            },
            "rope_scaling.long_factor = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, ...]: every number must be above 0",
        ),
        ({**GPT_OSS, "swiglu_limit": 5.0}, "swiglu_limit = 5.0: is not supported; only 7.0"),
        ({**GPT_OSS, "swiglu_alpha": 1.0}, "swiglu_alpha = 1.0: is not supported; only 1.702"),
        (
            {**GPT_OSS, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["a.experts"]}},
            "quantization_config.modules_to_not_convert = ['a.experts']: a.experts is not supported; the experts must",
        ),
        ({**GEMMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0: is not supported"),
        ({**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention = True: is not supported"),
        ({**GEMMA, "hidden_activation": "gelu"}, "hidden_act = 'gelu': is not supported; only gelu_pytorch_tanh"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window = -1: must be from 0"),
    ],
)
def test_bad_value_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        shape_of(tmp_path, **changes)
    assert f"config.json: {message}" in str(caught.value)


PHI = {"architectures": ["Phi3ForCausalLM"], "sliding_window": 8}


def test_gemmas_parts_are_read(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, **GEMMA, num_hidden_layers=7, rope_local_base_freq=500.0, query_pre_attn_scalar=24)
    assert shape.gemma == Gemma(local_rope_theta=500.0, query_scalar=24.0)
    assert (shape.hidden_act, shape.tie_word_embeddings, shape.norm_dtype) == ("gelu_tanh", True, "float32")
    assert [shape.window_of(layer) for layer in range(7)] == [8, 8, 8, 8, 8, 0, 8]
    assert [shape.is_local(layer) for layer in range(7)] == [True] * 5 + [False, True]
    layer = 4 * 64 + 2 * 32 + 2 * 64 * 4 * 32 + 2 * 64 * 2 * 32 + 3 * 64 * 160
    assert shape.num_parameters == 7 * layer + 64 + 300 * 64
    kinds = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": {}}
    newer = shape_of(tmp_path / "newer", **GEMMA, remove=("rope_theta",), rope_parameters=kinds)
    assert (newer.rope_theta, newer.rope_scaling) == (1e6, RopeScaling("linear", 8.0))
    assert newer.gemma == Gemma(local_rope_theta=10_000.0, query_scalar=256.0)


def test_gpt_oss_has_the_published_defaults(tmp_path: Path) -> None:
    absent = ("attention_bias", "rope_theta", "rope_scaling", "max_position_embeddings", "rms_norm_eps", "head_dim")
    shape = shape_of(tmp_path, **GPT_OSS, remove=absent)
    assert (shape.head_dim, shape.rope_theta, shape.rms_norm_eps, shape.max_positions) == (64, 150_000.0, 1e-5, 131_072)
    assert shape.rope_scaling is not None
    assert (shape.rope_scaling.type, shape.rope_scaling.factor, shape.rope_scaling.truncate) == ("yarn", 32.0, False)
    assert (shape.sinks, shape.attention_bias, shape.output_bias) == (True, True, True)
    assert [shape.window_of(layer) for layer in range(shape.num_layers)] == [128, 0] * (shape.num_layers // 2)
    experts = shape.experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.normalised) == (6, 2, True)
    assert (experts.biased, experts.activation, experts.intermediate_size) == (True, "clamped_silu", 160)


def test_longrope_is_read(tmp_path: Path) -> None:
    divisors: dict[str, Any] = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    changes = {**PHI, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 1024}
    for number, kind in enumerate(("longrope", "su")):
        shape = shape_of(tmp_path / str(number), **changes, rope_scaling={"type": kind, **divisors})
        assert (shape.head_dim, shape.rotary_dim, shape.rotary_width, shape.window_of(0)) == (16, 12, 16, 8)
        scaling = shape.rope_scaling
        assert scaling is not None
        assert (scaling.type, scaling.factor, scaling.original_max_position_embeddings) == ("longrope", 4.0, 1024)
        assert scaling.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(1024)))
        assert (scaling.short_factors, scaling.long_factors) == ((1.0,) * 6, (2.0,) * 6)
        assert shape.max_positions == 4096
    stated = {"rope_type": "longrope", "attention_factor": 1.25, "partial_rotary_factor": 0.75, **divisors}
    inside = shape_of(tmp_path / "inside", **PHI, rope_parameters=stated)
    assert inside.rope_scaling is not None
    assert (inside.rotary_dim, inside.rope_scaling.attention_factor) == (12, 1.25)


def test_dynamic_scaling_serves_beyond_the_trained_context(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, rope_scaling={"type": "dynamic", "factor": 3.0})
    assert shape.rope_scaling == RopeScaling("dynamic", 3.0, original_max_position_embeddings=4096)
    assert shape.max_positions == 3 * 4096
    assert shape_of(tmp_path / "plain").max_positions == 4096
    assert shape_of(tmp_path / "linear", rope_scaling={"type": "linear", "factor": 3.0}).max_positions == 4096


def test_yarn_is_read(tmp_path: Path) -> None:
    plain = shape_of(tmp_path / "plain", rope_scaling={"type": "yarn", "factor": 4.0})
    assert plain.rope_scaling is not None
    assert plain.rope_scaling.attention_factor == pytest.approx(0.1 * 1.3862943611 + 1)
    assert (plain.rope_scaling.original_max_position_embeddings, plain.max_positions) == (4096, 4 * 4096)
    stated = {"factor": 4.0, "original_max_position_embeddings": 512, "attention_factor": 0.5, "truncate": False}
    shape = shape_of(tmp_path / "stated", rope_scaling={"rope_type": "yarn", "beta_fast": 16, "beta_slow": 2, **stated})
    assert shape.rope_scaling == RopeScaling(
        "yarn", 4.0, original_max_position_embeddings=512, beta_fast=16.0, beta_slow=2.0, truncate=False,
        attention_factor=0.5,
    )  # fmt: skip
    assert shape.max_positions == 4096
    ratio = {"mscale": 1.0, "mscale_all_dim": 0.5}
    deepseek = shape_of(tmp_path / "ratio", rope_scaling={"rope_type": "yarn", "factor": 4.0, **ratio}).rope_scaling
    assert deepseek is not None
    assert deepseek.attention_factor == pytest.approx((0.1 * 1.3862943611 + 1) / (0.05 * 1.3862943611 + 1))


def test_the_sizes_of_linear_attention_are_read(tmp_path: Path) -> None:
    """The defaults are those of the published Qwen3-Next: each fourth layer has full attention."""
    values = HYBRID | {"layer_types": None, "num_hidden_layers": 8}
    shape = shape_of(tmp_path / "default", **values)
    assert shape.delta == GatedDelta(16, 32, 128, 128, taps=4, full_layers=(3, 7))
    assert shape.experts == Experts(8, 3, 48, normalised=True, shared_size=512, shared_gate=True)
    assert (shape.head_dim, shape.rotary_dim, shape.query_key_norm) == (256, 64, True)
    assert [shape.has_cache(layer) for layer in range(4)] == [False, False, False, True]
    assert shape.state_bytes(0) == 6 * 4 * (32 * 128 * 128 + 3 * (2 * 2048 + 4096))
    assert shape.state_bytes(5) == shape.state_bytes(0) + 6 * 4 * 5 * (2 * 2048 + 4096 + 2 * 32)
    stated = shape_of(
        tmp_path / "stated", **HYBRID, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=32,
        linear_value_head_dim=16, linear_conv_kernel_dim=3, partial_rotary_factor=0.5, head_dim=32,
    )  # fmt: skip
    assert stated.delta == GatedDelta(2, 6, 32, 16, taps=3, full_layers=(1,))
    assert stated.rotary_dim == 16


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layer_types": ["linear_attention"] * 2}, "must have layers of both kinds"),
        (
            {"layer_types": ["sliding_attention", "full_attention"]},
            "a list of 2 entries, each full_attention or linear_attention",
        ),
        ({"linear_num_value_heads": 24}, "must be a multiple of linear_num_key_heads = 16"),
        ({"linear_key_head_dim": 24}, "linear_key_head_dim = 24: must be a multiple of 16"),
        ({"linear_conv_kernel_dim": 17}, "linear_conv_kernel_dim = 17: must be from 1 to 16"),
        ({"attention_bias": True}, "attention has no biases"),
    ],
)
def test_wrong_sizes_of_linear_attention_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        shape_of(tmp_path, **HYBRID | changes)
