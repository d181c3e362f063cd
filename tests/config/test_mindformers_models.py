"""``model_type: mindformers`` is refused, with what to do, where MindFormers cannot compute what the folder says."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from model_folders import write_model_folder

from llm_serving.config import Config, load_config
from llm_serving.config.mindformers_models import ARCHITECTURES
from llm_serving.errors import ConfigError
from llm_serving.machine import Machine
from llm_serving.memory_plan import MINDFORMERS_BYTES, estimate_memory

MACHINE = Machine(1024**4, "test machine")
QWEN3: dict[str, object] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Let MindFormers be installed in a version, or not at all."""
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
def test_its_models_run_over_the_primitives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    installed(monkeypatch, "1.9.0")
    config = load(tmp_path, architectures=[architecture])
    assert (config.model_config.model_type, config.op_table, config.kv_format) == ("mindformers", "native", "float16")
    assert Config.from_json(config.to_json()) == config
    own = load(tmp_path, "model_config.model_type=dyn", "model_config.op_table=native", architectures=[architecture])
    assert own.cache_namespace != config.cache_namespace, "their bits differ"


REFUSED = [
    (["model_config.op_table=fused"], {}, "op_table = 'fused': with model_type mindformers use native or auto"),
    (["model_config.model_dtype=float32"], {}, "not with model_dtype float32"),
    (["model_config.kv_format=int8"], {}, "model_config.kv_format = 'int8'"),
    (["parallel_config.tensor_parallel=2"], {}, "parallel_config.tensor_parallel = 2: MindFormers' models are not"),
    (["parallel_config.pipeline_parallel=2"], {}, "parallel_config.pipeline_parallel = 2: MindFormers' models are not"),
    (["model_config.weight_format=int8"], {}, "model_config.weight_format = 'int8'"),
    ([], {"architectures": ["MistralForCausalLM"]}, "serves LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"),
    ([], {"architectures": ["LlamaForCausalLM"], "head_dim": 32}, "Llama has heads of hidden size / heads"),
    ([], {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, "ignores sliding_window = 64"),
    ([], {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling linear is not served with it"),
    ([], {"attention_bias": True}, "output layer of attention has no bias"),
]


@pytest.mark.parametrize(("overrides", "changes", "problem"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_it_cannot_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], changes: dict[str, object], problem: str
) -> None:
    installed(monkeypatch, "1.9.0")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *overrides, **changes)
    assert problem in str(caught.value)


def test_a_window_that_no_sequence_outgrows_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "1.9.0")
    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
    assert load(tmp_path, "pa_config.decode_seq_length=64", **window).shape.sliding_window == 64


def test_a_missing_package_is_named_with_the_way_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    with pytest.raises(ConfigError, match=r"the package mindformers is not installed; .*make setup-mindformers"):
        load(tmp_path)


def test_a_folder_of_its_name_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "path" / "mindformers").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "path")])
    monkeypatch.delitem(sys.modules, "mindformers", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match="the package mindformers is not installed"):
        load(tmp_path)


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "2.1.0")
    with pytest.raises(ConfigError, match=r"mindformers 2.1.0 is installed, and only 1.9 is served"):
        load(tmp_path)


def test_nobody_else_needs_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    assert load(tmp_path, "model_config.model_type=dyn").model_config.model_type == "dyn"


def test_the_memory_plan_has_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "1.9.0")
    own = ["model_config.model_type=dyn", "model_config.op_table=native"]
    plans = [estimate_memory(load(tmp_path, *overrides), MACHINE) for overrides in ([], own)]
    assert plans[0].bytes_of("agent process") - plans[1].bytes_of("agent process") == MINDFORMERS_BYTES
    assert plans[0].total_bytes - plans[1].total_bytes == MINDFORMERS_BYTES


def test_the_config_of_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and context come from MindFormers' own YAML."""
    installed(monkeypatch, "1.9.0")
    (tmp_path / "tokenizer.json").touch()
    overrides = ["model_config.load_format=dummy", f"tokenizer.vocab_file={tmp_path / 'tokenizer.json'}"]
    config = load_config("qwen3_mindformers.yaml", overrides, ascend=False)
    assert (config.model_name, config.device, config.op_table) == ("qwen3_0_6b", "CPU", "native")
    assert config.shape.num_parameters == 596_049_920, "Qwen3 0.6B as published"
    assert config.shape.query_key_norm
    assert config.end_token_ids == (151645,)
    assert config.context.max_device_memory_bytes == 59 * 1024**3
