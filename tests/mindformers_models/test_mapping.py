"""Tests how a step, the parameters and the settings are passed to MindFormers.

These tests do not need the package MindFormers.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.mindformers.families import INFERENCE_MODELS, gpt_settings, inference_model, llama_settings, moe_settings
from agent.mindformers.names import cache_names, names_of, our_parameters
from agent.mindformers.package import environment, import_mindformers
from llm_serving.config import Config, load_config
from llm_serving.config.mindformers_models import ARCHITECTURES
from llm_serving.errors import AgentStartError
from llm_serving.model.shape import ModelShape
from performance.models.folders import tensor_shapes, write_model
from support.forked_programs import run_forked
from support.json_program import printed_json
from support.mindformers_variants import VARIANTS
from support.model_folders import write_model_folder

PROGRAM = Path(__file__).with_name("mapping_program.py")

QWEN = {
    "model.embed_tokens.": "embedding.word_embeddings.",
    ".self_attn.q_proj.": ".self_attention.linear_qkv.",
    ".self_attn.k_proj.": ".self_attention.linear_qkv.",
    ".self_attn.v_proj.": ".self_attention.linear_qkv.",
    ".self_attn.o_proj.": ".self_attention.linear_proj.",
    ".self_attn.q_norm.": ".self_attention.q_layernorm.",
    ".self_attn.k_norm.": ".self_attention.k_layernorm.",
    ".mlp.gate_proj.": ".mlp.linear_fc1.",
    ".mlp.up_proj.": ".mlp.linear_fc1.",
    ".mlp.down_proj.": ".mlp.linear_fc2.",
    ".post_attention_layernorm.": ".pre_mlp_layernorm.",
    "model.norm.": "decoder.final_layernorm.",
    "lm_head.": "output_layer.",
    "model.layers.": "decoder.layers.",
}
"""``weight_mapping`` of mindformers/models/qwen3/utils.py, stacked as ``generate_mapping`` says (MindFormers 1.9.0)."""


LLAMA = {
    "embed_tokens.weight": "tok_embeddings.embedding_weight",
    ".self_attn.q_proj.": ".attention.wq.",
    ".self_attn.k_proj.": ".attention.wk.",
    ".self_attn.v_proj.": ".attention.wv.",
    ".self_attn.o_proj.": ".attention.wo.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".norm.": ".norm_out.",
}
"""``LlamaForCausalLM.convert_name`` of mindformers/models/llama/llama.py."""


EXPERTS = {
    ".mlp.gate.": ".mlp.router.",
    "gate_proj.weight": "weight1",
    "up_proj.weight": "weight1",
    "down_proj.weight": "weight2",
}
"""``weight_mapping`` of mindformers/models/qwen3_moe/utils.py, in addition to Qwen3's.

``make_expert_params_mapping`` of parallel_core/inference/weights_utils.py has two names for each expert weight. The
values here are the names that it uses.
"""


def theirs(checkpoint_name: str, architecture: str) -> str:
    if architecture == "Qwen3MoeForCausalLM":
        checkpoint_name = re.sub(r"(\.experts)\.\d+", r"\1", checkpoint_name)
        for hugging_face, mindformers in EXPERTS.items():
            checkpoint_name = checkpoint_name.replace(hugging_face, mindformers)
    for hugging_face, mindformers in (LLAMA if architecture == "LlamaForCausalLM" else QWEN).items():
        checkpoint_name = checkpoint_name.replace(hugging_face, mindformers)
    return checkpoint_name


@pytest.mark.parametrize("model", VARIANTS)
def test_every_tensor_of_a_checkpoint_gets_its_mindformers_name(tmp_path: Path, model: str) -> None:
    config = VARIANTS[model].config_json()
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (architecture,) = config["architectures"]
    parameters, names = our_parameters(ModelShape.from_hf_folder(tmp_path)), names_of(architecture)
    sizes: dict[str, int] = {}
    for name, shape in tensor_shapes(config).items():
        place = theirs(name, architecture)
        sizes[place] = sizes.get(place, 0) + math.prod(shape)
    assert {names.theirs(name): math.prod(shape) for name, shape in parameters.items()} == sizes


def test_expert_weights_have_the_layout_of_grouped_products(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VARIANTS["qwen3_moe"].config_json()), encoding="utf-8")
    parameters = our_parameters(ModelShape.from_hf_folder(tmp_path))
    assert parameters["layers.2.mlp.gate_up.weight"] == (8, 64, 2 * 96)
    assert parameters["layers.2.mlp.down.weight"] == (8, 96, 64)


def test_the_llama_of_mindformers_has_a_cache_per_layer() -> None:
    ((key, value),) = cache_names(1)
    names = names_of("LlamaForCausalLM")
    manager = "model.layers.0.attention.infer_attention.paged_attention_mgr"
    assert (names.theirs(key), names.theirs(value)) == (f"{manager}.key_cache", f"{manager}.value_cache")


def test_settings_come_from_the_model_and_the_deployment(tmp_path: Path) -> None:
    write_model(VARIANTS["qwen3_untied"], tmp_path)
    overrides = [f"model_config.model_path={tmp_path}", "model_config.model_dtype=bfloat16", "pa_config.num_blocks=99"]
    settings = gpt_settings(load_config("llama_tiny_cpu.yaml", [*overrides, "pa_config.decode_seq_length=200"]))
    assert settings == {
        "vocab_size": 419,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 200,
        "block_size": 16,
        "num_blocks": 99,
        "params_dtype": "bfloat16",
        "compute_dtype": "bfloat16",
        "layernorm_compute_dtype": "bfloat16",
        "rotary_dtype": "bfloat16",
        "softmax_compute_dtype": "float32",
    }


def test_settings_of_the_llama_of_mindformers(tmp_path: Path) -> None:
    write_model(VARIANTS["llama_untied"], tmp_path)
    overrides = [f"model_config.model_path={tmp_path}", "model_config.model_dtype=float16", "pa_config.num_blocks=99"]
    settings = llama_settings(load_config("llama_tiny_cpu.yaml", [*overrides, "pa_config.decode_seq_length=200"]))
    assert (
        settings
        | {
            "seq_length": 200,
            "max_position_embedding": 200,
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_layers": 4,
            "num_heads": 4,
            "n_kv_heads": 2,
            "theta": 10000.0,
            "num_blocks": 99,
            "tie_word_embeddings": False,
            "compute_dtype": "float16",
            "use_past": True,
            "is_dynamic": True,
            "use_flash_attention": True,
        }
        == settings
    )


def config_of(tmp_path: Path, model: str, *overrides: str, **changes: object) -> Config:
    """Returns the config of a variant with changed keys in ``config.json``.

    MindFormers serves the model, with up to 128 tokens.
    """
    write_model(replace(VARIANTS[model], config={**VARIANTS[model].config, **changes}), tmp_path)
    given = [f"model_config.model_path={tmp_path}", "model_config.model_dtype=float16", *overrides]
    config = load_config("llama_tiny_cpu.yaml", [*given, "pa_config.decode_seq_length=128"])
    return replace(config, model_config=replace(config.model_config, model_type="mindformers"))


@pytest.mark.parametrize(("model", "coefficient"), [("qwen3_yarn", 0.1), ("qwen2_yarn_scaled", 0.4 / math.log(6))])
def test_yarn_of_the_newer_models(tmp_path: Path, model: str, coefficient: float) -> None:
    """MindFormers' newer models get the YaRN settings, with ``coeff`` = (attention factor - 1) / ln(factor)."""
    scaling = gpt_settings(config_of(tmp_path, model))["rope_scaling"]
    stated = VARIANTS[model].config["rope_scaling"]
    assert scaling == {
        "rope_type": "yarn",
        "factor": stated["factor"],
        "original_max_position_embeddings": stated["original_max_position_embeddings"],
        "beta_fast": stated.get("beta_fast", 32.0),
        "beta_slow": stated.get("beta_slow", 1.0),
        "coeff": pytest.approx(coefficient),
    }


def test_linear_scaling_of_the_llama_of_mindformers(tmp_path: Path) -> None:
    settings = llama_settings(config_of(tmp_path, "llama_linear"))
    assert (settings["extend_method"], settings["scaling_factor"]) == ("PI", 3.0)
    assert settings["max_position_embedding"] == 128


@pytest.mark.parametrize(("trained", "positions"), [(64, 128), (127, 128), (128, 129), (8192, 8193)])
def test_llama3_scaling_of_the_llama_of_mindformers(tmp_path: Path, trained: int, positions: int) -> None:
    """The rotary tables are longer than the trained context, because MindFormers requires this."""
    stated = {**VARIANTS["llama_llama3"].config["rope_scaling"], "original_max_position_embeddings": trained}
    settings = llama_settings(config_of(tmp_path, "llama_llama3", rope_scaling=stated))
    assert (settings["extend_method"], settings["max_position_embedding"]) == ("LLAMA3", positions)
    assert settings["scaling_factor"] == {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": trained,
    }


def test_yarn_of_the_llama_of_mindformers(tmp_path: Path) -> None:
    """``mscale`` is chosen so that MindFormers computes the attention factor of the settings.

    Its formula is (0.1 * mscale * ln(factor) + 1) / (0.1 * mscale_all_dim * ln(factor) + 1).
    """
    settings = llama_settings(config_of(tmp_path, "llama_yarn_scaled"))
    assert (settings["extend_method"], settings["max_position_embedding"]) == ("YARN", 128)
    assert settings["scaling_factor"] == {
        "factor": 6.0,
        "original_max_position_embeddings": 48,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "mscale": pytest.approx(4 / math.log(6)),
        "mscale_all_dim": 0.0,
    }


def test_settings_of_experts(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3_moe")
    settings = moe_settings(config)
    assert settings == {
        **gpt_settings(config),
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "router_dense_type": "float32",
    }


def test_both_processes_know_the_same_architectures() -> None:
    assert tuple(INFERENCE_MODELS) == ARCHITECTURES
    with pytest.raises(AgentStartError, match="for architecture 'GPT2LMHeadModel'; there are: Llama"):
        inference_model("GPT2LMHeadModel")


def test_a_package_that_cannot_be_imported_is_a_start_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mindformers", None)
    variables: dict[str, str] = {"RUN_MODE": "train"}
    with pytest.raises(AgentStartError, match=r"cannot be imported: .*make setup-mindformers"):
        import_mindformers(tmp_path, variables)
    assert variables == environment(tmp_path)
    assert variables["RUN_MODE"] == "predict"
    assert variables["LOG_MF_PATH"] == str(tmp_path / "mindformers")


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Any:
    scratch = tmp_path_factory.mktemp("mapping")
    return printed_json(run_forked(PROGRAM, str(write_model_folder(scratch / "model")), folder=scratch))


@pytest.mark.parametrize("kind", ["prefill", "chunked", "decode"])
def test_a_step_reaches_the_model_unchanged(calls: Any, kind: str) -> None:
    call = calls[kind]
    assert call["token_ids"] == [5, 6, 7, 8, 9]
    assert call["positions"] == [0, 1, 2, 0, 1]
    assert call["slot_mapping"] == [16, 17, 18, 32, 33]
    assert call["block_tables"] == [[1, 0], [2, 0]]
    assert call["context_lens_tensor"] == [3, 2]
    assert call["logits"] == [[2.0], [4.0]], "of the last tokens only"
    assert call["caches"] == [[f"layers.{i}.attention.{name}" for i in (0, 1)] for name in ("key_cache", "value_cache")]


def test_whole_prompts_use_flash_attention_without_the_cache(calls: Any) -> None:
    call = calls["prefill"]
    assert call["flags"] == [{"is_prefill": True}, {"is_chunked": True}]
    assert call["batch_valid_length"] == call["q_seq_lens"] == [3, 2, 0, 0], "as many as FlashAttentionScore was given"
    assert call["mask_shape"] == [128, 128]


@pytest.mark.parametrize(("kind", "mask"), [("chunked", [1, 1]), ("decode", [1, 1])])
def test_other_steps_read_the_cache(calls: Any, kind: str, mask: list[int]) -> None:
    call = calls[kind]
    assert call["flags"] == [{"is_prefill": False}, {"is_chunked": True}]
    assert call["batch_valid_length"] == [3, 2]
    assert call["q_seq_lens"] == [3, 2]
    assert call["mask_shape"] == mask


def test_switches_and_cache(calls: Any) -> None:
    assert calls["switches"] == [True, False], "hidden states come back, and no length goes through MoveTo"
    assert calls["cache_shape"] == [256, 16, 2, 16]


@pytest.mark.parametrize("kind", ["prefill", "chunked", "decode"])
def test_the_llama_of_mindformers_gets_a_batch_of_one(calls: Any, kind: str) -> None:
    call, is_prefill = calls["llama"][kind], kind == "prefill"
    assert call["flags"] == [{"is_first_iteration": is_prefill}]
    assert call["token_ids"] == [[5, 6, 7, 8, 9]]
    assert call["position_ids"] == [0, 1, 2, 0, 1]
    assert call["slot_mapping"] == [16, 17, 18, 32, 33]
    assert call["block_tables"] == [[1, 0], [2, 0]]
    assert call["batch_valid_length"] == ([3, 2, 0, 0] if is_prefill else [3, 2])
    assert call["attention_mask"] == ([[7.0]] if kind == "chunked" else [[0.0]])
    assert call["logits"] == [[2.0] * 64, [4.0] * 64], "of the last tokens only"
