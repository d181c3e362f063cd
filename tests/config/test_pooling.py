"""Tests how the files of sentence-transformers and the settings of embeddings are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llm_serving.config import Config, load_config
from llm_serving.engine.scheduler_limits import scheduler_limits
from llm_serving.errors import CheckpointError, ConfigError
from llm_serving.model.pooling import ANY_DIMENSION, Pooling, Prompt
from support.model_folders import write_model_folder
from support.small_configs import small_overrides, write_json

TYPE = "sentence_transformers.models."
MODULES = [{"path": "", "type": f"{TYPE}Transformer"}, {"path": "1_Pooling", "type": f"{TYPE}Pooling"}]
DENSE = {"path": "2_Dense", "type": f"{TYPE}Dense"}
NORMALIZE = {"path": "3_Normalize", "type": f"{TYPE}Normalize"}
TANH = "torch.nn.modules.activation.Tanh"


def embedding_folder(folder: Path, *, modules: object = None, pooling: object = None, **changes: object) -> Path:
    write_model_folder(folder, **changes)
    write_json(folder / "modules.json", [*MODULES, NORMALIZE] if modules is None else modules)
    (folder / "1_Pooling").mkdir()
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True} if pooling is None else pooling)
    return folder


def load(folder: Path, *overrides: str) -> Config:
    wanted = [f"model_config.model_path={folder}", "model_config.model_name=m", *overrides]
    return load_config("llama_tiny_cpu.yaml", small_overrides(folder, wanted))


def test_a_folder_without_the_files_generates_text(tmp_path: Path) -> None:
    config = load(write_model_folder(tmp_path / "model"))
    assert config.pooling is None
    assert config.slot_limits().pooled_width == 0
    assert load(embedding_folder(tmp_path / "other"), "model_config.task=generate").pooling is None


def test_the_files_state_pooling_dense_layers_and_prompts(tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path / "model", modules=[*MODULES, DENSE], is_matryoshka=True)
    (folder / "2_Dense").mkdir()
    write_json(folder / "2_Dense" / "config.json", {"in_features": 64, "out_features": 24, "bias": False})
    prompts = {"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "query"}
    write_json(folder / "config_sentence_transformers.json", prompts)
    config = load(folder)
    pooling = config.pooling
    assert pooling is not None
    assert (pooling.method, pooling.width, pooling.normalises) == ("mean", 24, False)
    [dense] = pooling.dense
    assert (dense.in_features, dense.out_features, dense.bias, dense.activation) == (64, 24, False, "tanh")
    assert pooling.dimensions == (ANY_DIMENSION,)
    assert pooling.permits(24)
    assert not pooling.permits(25)
    assert (pooling.prompts, pooling.default_prompt) == ((Prompt("query", "q: "), Prompt("document", "")), "query")
    assert config.slot_limits().pooled_width == 24
    assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("pooling", "method"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_weightedmean_tokens": True}, "weighted_mean"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_only_the_last_token_may_use_the_prefix_cache(tmp_path: Path, pooling: object, method: str) -> None:
    swaps = ("scheduler_config.prefix_cache=True", "scheduler_config.preemption=swap")
    config = load(embedding_folder(tmp_path / "model", pooling=pooling), *swaps)
    assert config.pooling is not None
    assert config.pooling.method == method
    limits = scheduler_limits(config)
    assert limits.prefix_cache is (method == "last")
    assert limits.preemption.value == "recompute"


def test_any_model_may_serve_embeddings(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    config = load(folder, "model_config.task=embed", "model_config.matryoshka_dimensions=[16, 32]")
    assert config.pooling == Pooling("last", 64, normalises=True, dimensions=(16, 32))


def test_a_reranker_takes_yes_and_no_from_the_tokenizer(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    write_json(folder / "tokenizer.json", {"model": {"vocab": {"no": 7, "yes": 9, "maybe": 8}}})
    config = load(folder, "model_config.task=score")
    assert config.pooling == Pooling("last", 1, normalises=False, score_tokens=(7, 9))
    write_json(folder / "tokenizer.json", {"model": {"vocab": {"no": 7}}})
    with pytest.raises(CheckpointError, match="no tokens 'no' and 'yes'"):
        load(folder, "model_config.task=score")
    config = load(folder, "model_config.task=score", "model_config.score_token_ids=[3, 4]")
    assert config.pooling is not None
    assert config.pooling.score_tokens == (3, 4)


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        ([], None, "must hold a list of modules"),
        (MODULES[:1], None, "one Pooling or LogitScore must follow"),
        ([*MODULES, {"path": "x", "type": f"{TYPE}LSTM"}], None, "'LSTM' is not supported"),
        ([*MODULES, NORMALIZE, DENSE], None, "Dense follows Normalize"),
        ([MODULES[0], {"path": "../x", "type": f"{TYPE}Pooling"}], None, "not a folder inside"),
        ([MODULES[0], {"path": "\0", "type": f"{TYPE}Pooling"}], None, "null byte"),
        (None, {"pooling_mode_max_tokens": True}, "max_tokens is not supported"),
        (None, {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, "is not supported"),
        (None, {"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt is false"),
    ],
)
def test_damaged_and_unknown_files_are_refused(
    tmp_path: Path, modules: object, pooling: object, words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load(embedding_folder(tmp_path / "model", modules=modules, pooling=pooling))


def test_the_name_of_the_default_prompt_must_be_a_text(tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path / "model")
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"a": "b"}, "default_prompt_name": ["a"]})
    with pytest.raises(CheckpointError, match="must be a text"):
        load(folder)


def test_a_dense_layer_must_fit_the_model(tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path / "model", modules=[*MODULES, DENSE])
    (folder / "2_Dense").mkdir()
    file = folder / "2_Dense" / "config.json"
    write_json(file, {"in_features": 65, "out_features": 24, "activation_function": TANH})
    with pytest.raises(CheckpointError, match="in_features is 65; the module before has 64 outputs"):
        load(folder)
    write_json(file, {"in_features": 64, "out_features": 24, "activation_function": "torch.nn.GELU"})
    with pytest.raises(CheckpointError, match="GELU"):
        load(folder)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model_config.matryoshka_dimensions=[65]"], "declare at most as many"),
        (["model_config.task=score", "model_config.score_token_ids=[1]"], "two token ids"),
        (["model_config.task=score", "model_config.score_token_ids=[1, 300]"], "outside the vocabulary"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, overrides: list[str], words: str) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=words):
        load(embedding_folder(tmp_path / "model"), *overrides)


def test_declared_dimensions_must_be_numbers(tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path / "model", matryoshka_dimensions=["16"])
    with pytest.raises(CheckpointError, match="matryoshka_dimensions must be a list"):
        load(folder)
    assert json.loads((folder / "config.json").read_text())["matryoshka_dimensions"] == ["16"]
