"""Tests ``model_type: mindformers``. An error about a folder that MindFormers cannot compute names the remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from llm_serving.config import Config, load_config
from llm_serving.config.mindformers_models import ARCHITECTURES, rotary_positions
from llm_serving.errors import ConfigError
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import MINDFORMERS_BYTES, estimate_memory
from support.model_folders import write_model_folder

MACHINE = Machine(1024**4, "test machine")
QWEN3: dict[str, object] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
LLAMA: dict[str, object] = {"architectures": ["LlamaForCausalLM"]}
EXPERTS: dict[str, object] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
MOE: dict[str, object] = {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS}
LLAMA3: dict[str, object] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Makes MindFormers appear installed in ``version``, or not installed (None)."""
    find, read = importlib.util.find_spec, importlib.metadata.version

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        if name != "mindformers":
            return find(name, package)
        return None if version is None else ModuleSpec(name, None, origin="mindformers/__init__.py")

    def version_of(name: str) -> str:
        if name != "mindformers":
            return read(name)
        assert version is not None
        return version

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(importlib.metadata, "version", version_of)


def load(tmp_path: Path, *overrides: str, remove: tuple[str, ...] = (), **changes: object) -> Config:
    folder = write_model_folder(tmp_path / "model", remove=remove, **{**QWEN3, **changes})
    given = ["model_config.model_type=mindformers", "model_config.model_dtype=float16", *overrides]
    return load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={folder}", *given], ascend=False)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mindformers_models_use_native_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    installed(monkeypatch, "1.9.0")
    experts = EXPERTS if architecture == "Qwen3MoeForCausalLM" else {}
    config = load(tmp_path, architectures=[architecture], **experts)
    assert (config.model_config.model_type, config.op_table, config.kv_format) == ("mindformers", "native", "float16")
    assert Config.from_json(config.to_json()) == config
    table = "model_config.op_table=native"
    own = load(tmp_path, "model_config.model_type=dyn", table, architectures=[architecture], **experts)
    assert own.cache_namespace != config.cache_namespace, "their bits differ"


def scaled(kind: str, **values: object) -> dict[str, object]:
    """Returns a ``config.json`` with rotary scaling."""
    return {"rope_scaling": {"rope_type": kind, "factor": 2.0, **values}}


REFUSED = [
    (["model_config.op_table=fused"], {}, "op_table = 'fused': with model_type mindformers use native or auto"),
    (["model_config.model_dtype=float32"], {}, "cannot be used with model_dtype float32"),
    (["model_config.kv_format=int8"], {}, "model_config.kv_format = 'int8': MindFormers' models write keys"),
    (["parallel_config.tensor_parallel=2"], {}, "parallel_config.tensor_parallel = 2: MindFormers' models are not"),
    (["parallel_config.pipeline_parallel=2"], {}, "parallel_config.pipeline_parallel = 2: MindFormers' models are not"),
    (["model_config.weight_format=int8"], {}, "model_config.weight_format = 'int8'"),
    ([], {"architectures": ["MistralForCausalLM"]}, "serves LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"),
    ([], {"architectures": ["LlamaForCausalLM"], "head_dim": 32}, "Llama has a head size of hidden size / heads"),
    ([], {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, "ignores sliding_window = 64"),
    ([], scaled("linear"), "MindFormers' Qwen models have only rope_scaling yarn, and this is linear"),
    ([], scaled("dynamic"), "MindFormers' Qwen models have only rope_scaling yarn, and this is dynamic"),
    ([], scaled("llama3", **LLAMA3), "MindFormers' Qwen models have only rope_scaling yarn, and this is llama3"),
    ([], scaled("yarn", truncate=False), "rounds its bounds to whole dimensions, and truncate is false"),
    ([], scaled("yarn", factor=0.5), "accepts no factor below 1 with rope_scaling yarn, and it is 0.5"),
    ([], scaled("yarn", factor=1.0, attention_factor=1.5), "no attention_factor if factor is 1, and it is 1.5"),
    (
        ["pa_config.decode_seq_length=129"],
        scaled("yarn", original_max_position_embeddings=64),
        "ends at original_max_position_embeddings x factor = 128 tokens, and a sequence may have 129",
    ),
    ([], LLAMA | scaled("dynamic"), "MindFormers' Llama would ignore rope_scaling dynamic, it has linear, llama3,"),
    ([], LLAMA | scaled("llama3", **{**LLAMA3, "factor": 0.5}), "accepts no factor below 1 with rope_scaling llama3"),
    ([], LLAMA | scaled("yarn", truncate=False), "rounds its bounds to whole dimensions"),
    ([], MOE | {"mlp_only_layers": [1]}, "has experts in every layer, and here layers 1 have none"),
    ([], MOE | {"decoder_sparse_step": 2}, "has experts in every layer, and here layers 0 have none"),
    ([], MOE | {"mlp_only_layers": [0, 1]}, "has experts in every layer, and here all layers have none"),
    ([], MOE | {"num_experts_per_tok": 1}, "ignores norm_topk_prob if num_experts_per_tok is 1"),
    ([], {"attention_bias": True}, "output layer of attention has no bias"),
]


@pytest.mark.parametrize(("overrides", "changes", "problem"), REFUSED, ids=lambda value: str(value)[:40])
def test_settings_that_mindformers_does_not_support_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], changes: dict[str, object], problem: str
) -> None:
    installed(monkeypatch, "1.9.0")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *overrides, **changes)
    assert problem in str(caught.value)


SERVED = [
    (scaled("yarn", original_max_position_embeddings=64), 128),
    (scaled("yarn", original_max_position_embeddings=500), 1000),
    (scaled("yarn", original_max_position_embeddings=64, factor=1.0) | {"max_position_embeddings": 64}, 64),
    (MOE | scaled("yarn", original_max_position_embeddings=77, factor=2.5), 193),
    (MOE | {"num_experts_per_tok": 1, "norm_topk_prob": False}, 64),
    (LLAMA | scaled("linear", factor=0.5), 64),
    (LLAMA | scaled("llama3", **LLAMA3), 65),
    (LLAMA | scaled("llama3", **{**LLAMA3, "original_max_position_embeddings": 63}), 64),
    (LLAMA | scaled("yarn", original_max_position_embeddings=64, factor=9.0), 64),
    (LLAMA | scaled("yarn", original_max_position_embeddings=90), 90),
]


@pytest.mark.parametrize(("changes", "rows"), SERVED, ids=lambda value: str(value)[:60])
def test_supported_settings_load_and_the_plan_has_the_rotary_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], rows: int
) -> None:
    installed(monkeypatch, "1.9.0")
    config = load(tmp_path, "pa_config.decode_seq_length=64", **changes)
    assert (config.model_config.model_type, config.max_model_len) == ("mindformers", 64)
    assert rotary_positions(config) == rows
    assert estimate_memory(config, MACHINE).bytes_of("rotary tables") == 2 * rows * 16 * 4


def test_rotary_tables_of_our_own_models_end_at_max_model_len(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "1.9.0")
    stretched = scaled("yarn", original_max_position_embeddings=500)
    config = load(tmp_path, "model_config.model_type=dyn", "pa_config.decode_seq_length=64", **stretched)
    assert rotary_positions(config) == 64


def test_a_window_longer_than_every_sequence_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "1.9.0")
    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
    assert load(tmp_path, "pa_config.decode_seq_length=64", **window).shape.sliding_window == 64


def test_a_missing_package_is_named_with_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    with pytest.raises(ConfigError, match=r"the package mindformers is not installed; .*make setup-mindformers"):
        load(tmp_path)


def test_a_folder_named_mindformers_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "path" / "mindformers").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "path")])
    monkeypatch.delitem(sys.modules, "mindformers", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match="the package mindformers is not installed"):
        load(tmp_path)


def test_another_version_of_mindformers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "2.1.0")
    with pytest.raises(ConfigError, match=r"mindformers 2.1.0 is installed, and only 1.9 is supported"):
        load(tmp_path)


def test_other_model_types_do_not_need_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    assert load(tmp_path, "model_config.model_type=dyn").model_config.model_type == "dyn"


def test_the_memory_plan_counts_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "1.9.0")
    own = ["model_config.model_type=dyn", "model_config.op_table=native"]
    plans = [estimate_memory(load(tmp_path, *overrides), MACHINE) for overrides in ([], own)]
    assert plans[0].bytes_of("agent process") - plans[1].bytes_of("agent process") == MINDFORMERS_BYTES
    assert plans[0].total_bytes - plans[1].total_bytes == MINDFORMERS_BYTES


def test_the_mindformers_config_of_the_repository_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model sizes and the device context come from MindFormers' own YAML file."""
    installed(monkeypatch, "1.9.0")
    (tmp_path / "tokenizer.json").touch()
    overrides = ["model_config.load_format=dummy", f"tokenizer.vocab_file={tmp_path / 'tokenizer.json'}"]
    config = load_config("qwen3_mindformers.yaml", overrides, ascend=False)
    assert (config.model_name, config.device, config.op_table) == ("qwen3_0_6b", "CPU", "native")
    assert config.shape.num_parameters == 596_049_920, "Qwen3 0.6B as published"
    assert config.shape.query_key_norm
    assert config.end_token_ids == (151645,)
    assert config.context.max_device_memory_bytes == 59 * 1024**3
