"""Tests how the models of ``models_config`` are read from the command line, and which are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from llm_serving.cli import Launch, launch_from_command_line
from llm_serving.config import load_config
from llm_serving.model.source_files import files_fingerprint
from llm_serving.planning.machine import Machine
from llm_serving.registry.planned import with_log_folder
from support.model_folders import write_model_folder

GIB = 1024**3
MACHINE = Machine(100 * GIB, "test machine")
TINY = ["--config", "llama_tiny_cpu.yaml"]


def launch(models: object, *settings: str) -> Launch:
    """Returns the launch of the tiny model with further models, and with settings of ``models_config``."""
    text = yaml.safe_dump(models, default_flow_style=True, width=10_000).strip()
    sets = [f"models_config.models={text}", *(f"models_config.{setting}" for setting in settings)]
    return launch_from_command_line([*TINY, *(part for each in sets for part in ("--set", each))], MACHINE)


def refusal(models: object, *settings: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        launch(models, *settings)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_config_without_further_models_has_the_main_model_only() -> None:
    planned = launch_from_command_line(TINY, MACHINE).models
    assert [(model.name, model.pinned) for model in planned.models] == [("llama_tiny", True)]


def test_a_further_model_gets_its_own_settings_and_the_servers_log(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "other")
    sets = ["pa_config.num_blocks=177", "serving_config.tool_format=none"]
    entry = {"name": "b", "config": "llama_tiny_cpu.yaml", "model": str(folder), "set": sets, "pinned": True}
    found = launch([entry])
    main, model = found.models.models
    assert main.config == found.config
    assert (model.name, model.pinned) == ("b", True)
    assert model.config.pa_config.num_blocks == 177
    assert model.config.serving_config.tool_format == "none"
    assert model.config.model_config.model_path == str(folder)
    assert model.config.serving_config.agent_ports == (0,)
    log = Path(main.config.log_config.path)
    assert Path(model.config.log_config.path) == log.parent / "b" / log.name
    folders = {with_log_folder(model.config, number).log_config.path for number in range(4)}
    assert len(folders) == 3, "two versions in turn do not share a folder"


def test_a_model_read_again_keeps_its_sizes(tmp_path: Path) -> None:
    """Without the kept sizes, the model would get other ones: a config with only ``model`` gets the longest context
    that fits.
    """
    folder = write_model_folder(tmp_path / "long", max_position_embeddings=100_000)
    shorter = write_model_folder(tmp_path / "short", max_position_embeddings=100_000, hidden_size=128)
    _, model = launch([{"name": "b", "model": str(folder)}]).models.models
    assert model.load is not None
    again, need = model.load(None, model.config)
    assert (again.max_model_len, again.pa_config) == (model.config.max_model_len, model.config.pa_config)
    assert need == model.need
    other, _ = model.load(str(shorter), model.config)
    assert other.model_config.model_path == str(shorter)
    assert (other.model_name, other.shape.hidden_size) == ("b", 128)
    assert other.max_model_len == model.config.max_model_len


def test_the_printed_config_gives_the_same_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "models_config.models=[{name: b, config: llama_tiny_cpu.yaml, set: ['pa_config.num_blocks=177']}]"
    with pytest.raises(SystemExit):
        launch_from_command_line([*TINY, "--set", text, "--print-config"], MACHINE)
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert load_config(str(file)).models_config == load_config("llama_tiny_cpu.yaml", [text]).models_config


def test_the_check_shows_what_each_model_needs(capsys: pytest.CaptureFixture[str]) -> None:
    text = "models_config.models=[{name: b, config: llama_tiny_cpu.yaml, pinned: true}]"
    with pytest.raises(SystemExit) as ended:
        launch_from_command_line([*TINY, "--set", text, "--check"], MACHINE)
    assert ended.value.code == 0
    assert re.search(r"\n  b: \d+\.\d MiB of host memory, pinned\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"config": "llama_tiny_cpu.yaml"}, "has no name"),
        ({"name": "b"}, "needs `config`, `model` or both"),
        ({"name": "llama_tiny", "config": "llama_tiny_cpu.yaml"}, "appears twice"),
        ({"name": "b", "config": "nowhere.yaml"}, "nowhere.yaml"),
        ({"name": "b", "config": "llama_tiny_cpu.yaml", "model": "/nowhere"}, "model 'b'"),
        ({"name": "b/c", "config": "llama_tiny_cpu.yaml"}, "b/c"),
        ({"name": "b", "config": "llama_tiny_cpu.yaml", "set": ["pa_config.blocks=1"]}, "pa_config.blocks"),
        ({"name": "b", "config": "llama_tiny_cpu.yaml", "pined": True}, "did you mean 'pinned'"),
        ({"name": "b", "config": "llama_tiny_cpu.yaml", "pinned": "yes"}, "true or false"),
        ({"name": "b", "config": "llama_tiny_cpu.yaml", "set": ["models_config.models=[{name: c}]"]}, "must not have"),
    ],
)
def test_a_wrong_model_is_refused(
    entry: dict[str, object], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert problem in refusal([entry], capsys=capsys)


def test_models_that_can_never_fit_are_refused_with_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"name": "b", "config": "llama_tiny_cpu.yaml"}
    message = refusal([entry], f"memory_limit={GIB}", capsys=capsys)
    assert "may have 1.0 GiB (models_config.memory_limit)" in message
    assert "llama_tiny" in message
    assert refusal([entry], "memory_limit=5", capsys=capsys).count("must be at least 1024") == 1
    assert "at least 0.1" in refusal([entry], "idle_unload_s=0", capsys=capsys)


def test_the_digest_changes_with_the_files(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    first = files_fingerprint(folder)
    assert first == files_fingerprint(folder) != ""
    (folder / "model.safetensors").write_bytes(b"other")
    assert files_fingerprint(folder) != first
    assert files_fingerprint(None) == ""


def test_another_digest_is_another_namespace_of_the_prefix_cache() -> None:
    config = load_config("llama_tiny_cpu.yaml")
    spaces = {replace(config, files_fingerprint=digest).cache_namespace for digest in ("", "a", "b")}
    assert len(spaces) == 3
