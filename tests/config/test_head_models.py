"""Tests heads in the config and in the memory plan: sizes, the layers whose hidden states the head reads, and refusals.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llm_serving.config import Config, load_config
from llm_serving.errors import CheckpointError, ConfigError
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import GIB, estimate_memory
from performance.models.heads import eagle_config, eagle_variant, mtp_variant
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
    """Loads the config of a small model with a head. ``head`` and ``model`` change their ``config.json``."""
    variant = mtp_variant() if method == "mtp" else eagle_variant()
    folder = write_model_folder(tmp_path / "model", **{**variant.config_json(), **model})
    given = [f"model_config.model_path={folder}", f"speculative_config.method={method}", *overrides]
    if method == "eagle":
        own = tmp_path / "head"
        own.mkdir(parents=True)
        (own / "config.json").write_text(json.dumps(eagle_config(variant.config) | (head or {})), encoding="utf-8")
        if (head or {}).get("weights", True):
            (own / "model.safetensors").touch()
        given.append(f"speculative_config.model={own}")
    return load_config("llama_tiny_cpu.yaml", given, ascend=ascend)


def test_an_eagle_head_takes_three_hidden_states(tmp_path: Path) -> None:
    config = load(tmp_path, "eagle", head={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}})
    assert config.draft is not None
    assert config.draft.head is not None
    assert config.draft.head.layers == (2, 4, 5)
    assert config.tapped_layers == (2, 4, 5)
    own = config.draft_config()
    assert (own.shape.num_layers, own.shape.vocab_size, own.shape.head_dim) == (1, 160, 16)
    assert (own.tapped_layers, config.max_draft_ids) == ((), 7)
    assert own.max_model_len == config.max_model_len == 512, "config.json of the head states 128"
    assert own.pa_config.num_blocks == config.pa_config.num_blocks + config.max_num_seqs
    assert Config.from_json(config.to_json()) == config


def test_an_mtp_layer_takes_the_last_hidden_state_and_has_experts(tmp_path: Path) -> None:
    config = load(tmp_path, "mtp")
    own = config.draft_config()
    assert config.tapped_layers == (3,)
    assert own.shape.has_experts(0)
    assert not config.shape.has_experts(0)
    assert (own.shape.num_layers, own.shape.latent) == (1, config.shape.latent)


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
        ("eagle", [], {"num_hidden_layers": 3}, "the model has 3 layers; an EAGLE-3 head needs 4"),
        ("eagle", [], {"hidden_size": 64}, "hidden_size = 96: must be 64 as in the model"),
        ("eagle", [], {"vocab_size": 500}, "vocab_size = 419: must be 500 as in the model"),
        ("eagle", [], {"head": {"architectures": ["LlamaForCausalLM"]}}, "must name an EAGLE-3 head"),
        ("eagle", [], {"head": {"num_hidden_layers": 2}}, "must be 1; heads with several layers are not supported"),
        ("eagle", [], {"head": {"norm_before_residual": True}}, "norm_before_residual = True: is not supported"),
        ("eagle", [], {"head": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, "only [2, 4, 5], the usual layers"),
        ("eagle", [], {"head": {"weights": False}}, "convert pytorch_model.bin to safetensors"),
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
