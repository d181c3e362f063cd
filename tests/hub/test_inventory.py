"""Tests ``llm-serving models`` and the inventory of models that it lists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llm_serving.commands import models
from llm_serving.commands.models import verdict
from llm_serving.hub.hugging_face import HuggingFace
from llm_serving.hub.inventory import FoundModel, hugging_face_models, model_scope_models
from llm_serving.hub.model_scope import ModelScope
from llm_serving.hub.names import ModelName
from llm_serving.planning.machine import Machine
from support.hub_server import REPOSITORY, folder_files, hub_server
from support.small_configs import TINY_LLAMA

LARGE, SMALL = Machine(100 * 1024**3, "test machine"), Machine(1024**3 // 2, "test machine")


def test_models_of_both_caches_and_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with hub_server(folder_files(TINY_LLAMA)) as server:
        HuggingFace(server.url, tmp_path / "hf").fetch(ModelName("hf", REPOSITORY))
        ModelScope(server.url, tmp_path / "ms").fetch(ModelName("ms", REPOSITORY))
        server.files = {"broken.gguf": b"GGUF", "readme.md": b""}
        HuggingFace(server.url, tmp_path / "hf2").fetch(ModelName("hf", REPOSITORY))
    assert [each.name for each in hugging_face_models(tmp_path / "hf2")] == [f"hf:{REPOSITORY}/broken.gguf"]
    monkeypatch.setattr(models, "hub_caches", lambda: (tmp_path / "hf", tmp_path / "ms"))
    assert models.main(["--json"]) == 0
    rows = {row["model"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {"models/tiny_llama", f"hf:{REPOSITORY}", f"ms:{REPOSITORY}"} <= set(rows)
    needed = list((tmp_path / "ms" / "Tiny-Org" / "Tiny___Model").iterdir())
    for name in (f"hf:{REPOSITORY}", f"ms:{REPOSITORY}"):
        assert rows[name]["bytes"] == sum(path.stat().st_size for path in needed)
        assert rows[name]["architecture"] == "LlamaForCausalLM"
        assert rows[name]["served"] == "yes"
    assert models.main([]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["model", "size", "format", "architecture", "served"]
    assert len(table) == len(rows) + 1


def test_a_model_that_cannot_be_served_has_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF")
    broken = FoundModel("hf:o/r/broken.gguf", path, 4, "GGUF", "-")
    assert verdict(broken, LARGE).startswith("no: not a GGUF file that can be read, or truncated")
    tiny = FoundModel("models/tiny_llama", TINY_LLAMA, 1, "float32", "LlamaForCausalLM")
    assert verdict(tiny, LARGE) == "yes"
    assert verdict(tiny, SMALL).startswith("no: the memory plan needs ")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    other = FoundModel("hf:o/other", tmp_path / "other", 1, "-", "BertModel")
    assert verdict(other, LARGE).startswith("no: config.json: ")


def test_empty_caches(tmp_path: Path) -> None:
    assert list(hugging_face_models(tmp_path / "none")) == []
    assert list(model_scope_models(tmp_path / "none")) == []
