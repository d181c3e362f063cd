"""Tests heads in the config and in the memory plan: sizes, the layers whose hidden states the head reads, and refusals.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from llm_serving.config import Config, load_config
from llm_serving.config.draft_config import draft_config
from llm_serving.errors import CheckpointError, ConfigError
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import GIB, estimate_memory
from performance.models.heads import (
    eagle_config,
    eagle_variant,
    hybrid_eagle_variant,
    mtp_variant,
    speculators_config,
)
from performance.models.variants import FAMILY_VARIANTS
from support.model_folders import write_model_folder

PLENTY = Machine(1000 * GIB, "test machine", num_cores=2)


def load(
    tmp_path: Path,
    method: str,
    *overrides: str,
    head: dict[str, Any] | None = None,
    ascend: bool = False,
    **model: Any,
) -> Config:
    """Loads the config of a small model with a head. ``head`` and ``model`` change their ``config.json``.

    With ``files`` in ``head``, the head's folder has these empty files instead of ``model.safetensors``.
    """
    variant = mtp_variant() if method == "mtp" else eagle_variant()
    folder = write_model_folder(tmp_path / "model", **{**variant.config_json(), **model})
    given = [f"model_config.model_path={folder}", f"speculative_config.method={method}", *overrides]
    if method == "eagle":
        own = tmp_path / "head"
        own.mkdir(parents=True)
        (own / "config.json").write_text(json.dumps(eagle_config(variant.config) | (head or {})), encoding="utf-8")
        for name in (head or {}).get("files", ["model.safetensors"]):
            (own / name).touch()
        given.append(f"speculative_config.model={own}")
    return load_config("llama_tiny_cpu.yaml", given, ascend=ascend)


def test_an_eagle_head_takes_three_hidden_states(tmp_path: Path) -> None:
    config = load(tmp_path, "eagle", head={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}})
    assert config.draft is not None
    assert config.draft.head is not None
    assert config.draft.head.layers == (2, 4, 5)
    assert config.tapped_layers == (2, 4, 5)
    own = draft_config(config)
    assert (own.shape.num_layers, own.shape.vocab_size, own.shape.head_dim) == (1, 160, 16)
    assert (own.tapped_layers, config.max_draft_ids) == ((), 7)
    assert own.max_model_len == config.max_model_len == 512, "config.json of the head states 128"
    assert own.pa_config.num_blocks == config.pa_config.num_blocks + config.max_num_seqs
    assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("stated", "layers"),
    [
        ({}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [8, 1, 3]}, (8, 1, 3)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}}, (1, 4, 8)),
    ],
)
def test_a_head_reads_the_layers_that_it_states(
    stated: dict[str, Any], layers: tuple[int, ...], tmp_path: Path
) -> None:
    """At the top level, the first layer has the number 1. In ``eagle_config``, it has the number 0. The usual layers
    are known in both counts.
    """
    config = load(tmp_path, "eagle", head=stated)
    assert config.draft is not None
    assert config.draft.head is not None
    assert config.draft.head.layers == layers
    assert config.tapped_layers == tuple(sorted(layers))


def test_a_model_with_few_layers_has_a_head_that_states_its_layers(tmp_path: Path) -> None:
    config = load(tmp_path, "eagle", head={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, num_hidden_layers=3)
    assert config.tapped_layers == (1, 2, 3)


def test_a_head_of_the_authors_has_the_name_of_a_llama(tmp_path: Path) -> None:
    """Their ``num_hidden_layers`` may be that of the model. Only heads have the tensor ``fc.weight``."""
    changes = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40}
    with pytest.raises(CheckpointError, match=r"there is no tensor fc\.weight, so this is not an EAGLE-3 head"):
        load(tmp_path / "complete", "eagle", head=changes)
    save_file({"fc.weight": np.zeros((1, 1), np.float32)}, tmp_path / "fc.safetensors")
    with pytest.raises(CheckpointError, match="there is no tensor"):
        load(tmp_path, "eagle", head=changes)
    head, model = tmp_path / "head", tmp_path / "model"
    (tmp_path / "fc.safetensors").rename(head / "model.safetensors")
    given = [f"model_config.model_path={model}", "speculative_config.method=eagle", f"speculative_config.model={head}"]
    config = load_config("llama_tiny_cpu.yaml", given, ascend=False)
    own = draft_config(config)
    assert (own.shape.num_layers, own.shape.vocab_size, own.shape.architecture) == (1, 160, "LlamaForCausalLM")


def test_a_head_of_speculators_nests_the_sizes_of_its_layer(tmp_path: Path) -> None:
    nested = speculators_config(eagle_variant().config)
    tied = nested | {"transformer_layer_config": nested["transformer_layer_config"] | {"tie_word_embeddings": True}}
    flat = dict.fromkeys(eagle_config(eagle_variant().config))
    config = load(tmp_path, "eagle", head=flat | tied)
    assert config.draft is not None
    assert config.draft.head is not None
    assert (config.draft.head.layers, config.draft.head.norm_before_residual) == ((1, 4, 8), True)
    own, plain = draft_config(config).shape, draft_config(load(tmp_path / "plain", "eagle")).shape
    assert own == plain
    assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize(("stated", "normed"), [(None, False), (False, False), (True, True)])
def test_the_residual_stream_of_a_head_may_begin_with_the_normalised_state(
    stated: bool | None, normed: bool, tmp_path: Path
) -> None:
    config = load(tmp_path, "eagle", head={"norm_before_residual": stated})
    assert config.draft is not None
    assert config.draft.head is not None
    assert config.draft.head.norm_before_residual == normed


def test_an_error_about_a_pickle_has_the_command_that_converts_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"PyTorch pickles are not loaded, as they can run code") as caught:
        load(tmp_path / "a folder", "eagle", head={"files": ["pytorch_model.bin"]})
    command = str(caught.value).partition("are installed: ")[2]
    words = shlex.split(command)
    assert words[:5] == ["cd", str(tmp_path / "a folder" / "head"), "&&", "python", "-c"]
    compile(words[5], "command", "exec")
    assert "torch.load(\"pytorch_model.bin\", weights_only=True" in words[5]
    assert "\"model.safetensors\")" in words[5]


def test_an_error_about_several_pickles_has_no_command_for_the_first_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"convert b\.bin, c\.bin to one file model\.safetensors") as caught:
        load(tmp_path, "eagle", head={"files": ["c.bin", "b.bin"]})
    assert "python -c" not in str(caught.value)


def test_an_mtp_layer_takes_the_last_hidden_state_and_has_experts(tmp_path: Path) -> None:
    config = load(tmp_path, "mtp")
    own = draft_config(config)
    assert config.tapped_layers == (3,)
    assert own.shape.has_experts(0)
    assert not config.shape.has_experts(0)
    assert (own.shape.num_layers, own.shape.latent) == (1, config.shape.latent)


def write_hybrid(folder: Path, name: str, *tensors: str) -> Path:
    """Writes the config of a small model with linear attention, and a file with these tensors. Returns the folder."""
    write_model_folder(folder, **mtp_variant(name).config_json())
    save_file({each: np.zeros(64, np.float32) for each in tensors}, folder / "model.safetensors")
    return folder


def load_hybrid(folder: Path, *overrides: str) -> Config:
    given = [f"model_config.model_path={folder}", "speculative_config.method=mtp", *overrides]
    return load_config("llama_tiny_cpu.yaml", given, ascend=False)


def test_the_mtp_layer_of_a_hybrid_has_full_attention_and_no_states(tmp_path: Path) -> None:
    """The first layers of the model have linear attention, and its second layer has no experts."""
    config = load_hybrid(write_hybrid(tmp_path, "qwen3_next", "mtp.norm.weight"))
    own = draft_config(config)
    shape = own.shape
    assert config.tapped_layers == (4,)
    assert (shape.num_layers, shape.num_cache_layers, shape.state_bytes(4), shape.delta) == (1, 1, 0, None)
    assert (shape.gated_attention, shape.query_key_norm, shape.norm_dtype) == (True, True, "float32")
    assert (shape.rotary_dim, shape.has_experts(0), shape.experts and shape.experts.shared_size) == (16, True, 96)
    assert not own.slot_limits().has_states
    assert config.slot_limits().has_states
    assert Config.from_json(config.to_json()) == config


def test_the_plan_counts_the_mtp_layer_of_a_hybrid(tmp_path: Path) -> None:
    plan = estimate_memory(load_hybrid(write_hybrid(tmp_path, "qwen3_5", "mtp.norm.weight")), PLENTY)
    hidden, inner, query, key = 64, 160, 4 * 32, 2 * 32
    attention = hidden * (2 * query + 2 * key) + query * hidden
    linear = 2 * hidden * hidden + attention + 3 * hidden * inner + 419 * hidden
    assert plan.bytes_of("draft model: weights") == 4 * (linear + 5 * hidden + 2 * 32)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (("model.norm.weight",), "needs an MTP layer, and the model's folder has no tensor mtp.norm.weight; set auto"),
        (
            ("mtp.norm.weight", "mtp.embed_tokens.weight"),
            "cannot be used with an MTP layer that has its own embedding (mtp.embed_tokens.weight); set auto",
        ),
    ],
)
def test_a_hybrid_without_a_usable_mtp_layer_is_refused(tensors: tuple[str, ...], message: str, tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path, "qwen3_next", *tensors)
    with pytest.raises(ConfigError) as caught:
        load_hybrid(folder)
    assert message in str(caught.value)
    config = load_hybrid(folder, "model_config.load_format=dummy")
    assert config.draft is not None, "random weights need no tensors"


@pytest.mark.parametrize(
    ("tensors", "stored", "linear_bits"),
    [
        (("o_proj.weight",), (None, 1), 32),
        (("o_proj.weight", "o_proj.weight_scale"), ("int4", 32), 4.625),
        (("o_proj.qweight",), ("int4", 32), 4.625),
    ],
)
def test_the_mtp_layer_of_a_quantized_hybrid_may_be_floats(
    tensors: tuple[str, ...], stored: tuple[str | None, int], linear_bits: float, tmp_path: Path
) -> None:
    """The memory plan counts the MTP layer in its own format, including the linear layer of its joined inputs. An int4
    group of 64 values has a scale of 32 bits and a zero point of 8 bits, so a value takes 4.625 bits.
    """
    names = [f"mtp.layers.0.self_attn.{each}" for each in tensors]
    folder = write_hybrid(tmp_path, "qwen3_5", "mtp.norm.weight", *names)
    stated = json.loads((folder / "config.json").read_text())
    stated["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    (folder / "config.json").write_text(json.dumps(stated))
    config = load_hybrid(folder)
    assert config.draft is not None
    assert (config.draft.stored_weight_format, config.draft.stored_weight_group) == stored
    assert (config.stored_weight_format, config.stored_weight_group) == ("int4", 32)
    hidden, inner, query, key = 64, 160, 4 * 32, 2 * 32
    attention = hidden * (2 * query + 2 * key) + query * hidden
    linear = 2 * hidden * hidden + attention + 3 * hidden * inner + 419 * hidden
    norms = 5 * hidden + 2 * 32
    [weights] = [item for item in estimate_memory(config, PLENTY).items if item.name == "draft model: weights"]
    assert weights.num_bytes == linear * linear_bits / 8 + 4 * norms
    assert weights.basis.endswith(stored[0] or "float32")


def test_an_eagle_head_of_a_hybrid_is_a_llama_layer(tmp_path: Path) -> None:
    config = load(tmp_path, "eagle", head=eagle_config(hybrid_eagle_variant().config), **hybrid_eagle_variant().config)
    own = draft_config(config).shape
    assert config.tapped_layers == (2, 4, 5)
    assert (own.architecture, own.delta, own.gated_attention, own.norm_dtype) == ("LlamaForCausalLM", None, False, None)


def test_the_plan_counts_a_head(tmp_path: Path) -> None:
    config = load(tmp_path, "eagle")
    plan = estimate_memory(config, PLENTY)
    hidden, inner, heads, kv_heads = 96, 96, 4 * 16, 2 * 16
    attention = 2 * hidden * (heads + 2 * kv_heads) + heads * hidden
    linear = 3 * hidden * hidden + attention + 3 * hidden * inner + 160 * hidden
    assert plan.bytes_of("draft model: weights") == 4 * (linear + 4 * hidden)
    states = 2048 * hidden * 4
    assert plan.bytes_of("draft model: hidden states") == 11 * states


def test_one_agent_of_a_group_has_the_head_and_the_whole_embedding(tmp_path: Path) -> None:
    alone = estimate_memory(load(tmp_path / "one", "eagle", "model_config.cpu_threads=1"), PLENTY)
    plan = estimate_memory(load(tmp_path / "two", "eagle", "parallel_config.tensor_parallel=2"), PLENTY)
    sizes = [{item.name: item.num_bytes for item in items} for items in plan.ranks]
    weights, states, cache = (f"draft model: {name}" for name in ("weights", "hidden states", "KV cache"))
    embedding, buffer = 419 * 96 * 4, 2048 * 96 * 4
    assert [each[weights] for each in sizes] == [alone.bytes_of(weights) + embedding, 0]
    assert [each[cache] for each in sizes] == [alone.bytes_of(cache), 0]
    assert [each[states] for each in sizes] == [11 * buffer, 3 * buffer], "the graph of each agent has three outputs"


@pytest.mark.parametrize(
    ("method", "overrides", "changes", "message"),
    [
        ("mtp", [], {"num_nextn_predict_layers": 0}, "config.json of the model states none (num_nextn_predict_layers)"),
        ("mtp", ["parallel_config.pipeline_parallel=2"], {}, "cannot be used with stages of a pipeline"),
        ("eagle", [], {"num_hidden_layers": 3}, "must be stated, as the model has 3 layers, fewer than 4"),
        (
            "eagle",
            [],
            FAMILY_VARIANTS["gemma3"].config_json(),
            "cannot be used with a Gemma3ForCausalLM: a head needs the model's embedding without the scale that Gemma",
        ),
        ("eagle", [], {"hidden_size": 64}, "hidden_size = 96: must be 64 as in the model"),
        ("eagle", [], {"vocab_size": 500}, "vocab_size = 419: must be 500 as in the model"),
        (
            "eagle",
            [],
            {"head": {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}},
            "must name an EAGLE-3 head, for example LlamaForCausalLMEagle3, or must be LlamaForCausalLM with a draft_",
        ),
        ("eagle", [], {"head": {"architectures": ["Qwen3ForCausalLM"]}}, "must name an EAGLE-3 head"),
        ("eagle", [], {"head": {"num_hidden_layers": 2}}, "must be 1; heads with several layers are not supported"),
        ("eagle", [], {"head": {"norm_before_fc": True}}, "norm_before_fc = True: is not supported"),
        (
            "eagle",
            [],
            {"head": {"eagle_config": {"norm_before_fc": True}}},
            "eagle_config.norm_before_fc = True: is not supported",
        ),
        (
            "eagle",
            [],
            {"head": {"eagle_config": {"use_aux_hidden_state": False}}},
            "use_aux_hidden_state = False: is not supported",
        ),
        ("eagle", [], {"head": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, "every number must be from 1 to 8"),
        (
            "eagle",
            [],
            {"head": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 8]}}},
            "every number must be from 0 to 7",
        ),
        ("eagle", [], {"head": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "must be a list of 3 numbers of layers"),
        ("eagle", [], {"head": {"transformer_layer_config": {"model_type": "qwen3"}}}, "only llama"),
        ("eagle", [], {"head": {"speculators_model_type": "mtp", "transformer_layer_config": {}}}, "only eagle3"),
        ("eagle", [], {"head": {"files": []}}, "there are no *.safetensors files with the weights of the head"),
        (
            "eagle",
            ["model_config.op_table=native", "model_config.model_dtype=bfloat16", "model_config.kv_format=int8"],
            {},
            "cannot be used with native operators and model_config.kv_format: int8",
        ),
        (
            "eagle",
            ["model_config.model_dtype=bfloat16"],
            {"ascend": True},
            "speculative_config.method = 'eagle': cannot be used with an Ascend, as it has not been run there; set "
            "auto or off",
        ),
        ("mtp", ["model_config.model_dtype=bfloat16"], {"ascend": True}, "cannot be used with an Ascend"),
    ],
)
def test_what_does_not_fit_is_refused(
    method: str, overrides: list[str], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        load(tmp_path, method, *overrides, **changes)
    assert message in str(caught.value)
