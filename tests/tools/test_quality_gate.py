"""Tests tools/quality_gate.py: its verdicts, and a small run whose model is served in a separate process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from agent.models.names import ignorable_suffixes, weight_specs
from agent.weights import load_weights, open_weights
from llm_serving.config import load_config
from llm_serving.engine.tokenizer_backends import load_tokenizer
from llm_serving.errors import CheckpointError, ConfigError
from llm_serving.model.shape import ModelShape
from support.forked_programs import run_forked
from support.gguf_oracle import write_pair
from support.json_program import run_program
from support.small_configs import REPOSITORY
from tools import quality_gate
from tools.quality_gate import FORMATS, Model, Quality, chosen_formats, is_available, table_line
from tools.quality_texts import calibration_texts, general_texts, generated_texts
from tools.quantization.float_folder import write_float_folder


def test_a_format_passes_up_to_its_limit() -> None:
    assert Quality("int8", 1.7, 0.01, 0.99, 0.01, 1.0).passes
    assert not Quality("int8", 1.7, 0.0101, 0.99, 0.01, 1.0).passes
    assert Quality("bf16", 1.7, 9.0, 1.0, None, 1.0).passes
    assert table_line(Quality("int4", 1.7, 0.06, 0.9, 0.05, 1.0)).endswith("TOO FAR")


def test_the_limits_of_the_formats() -> None:
    limits = {each.name: each.limit for each in FORMATS}
    assert limits["int8"] == limits["int8_weight_only"] == limits["kv int8"] == 0.01
    assert limits["int4"] == limits["int4_weight_only"] == limits["int4 gptq"] == 0.05


def test_the_baseline_is_always_measured_first() -> None:
    assert [each.name for each in chosen_formats("int4, int8")] == ["bf16", "int8", "int4"]
    with pytest.raises(ConfigError, match="--formats int5: the formats are bf16, "):
        chosen_formats("int5")


def test_texts_are_held_out_documents() -> None:
    tokenizer = load_tokenizer(load_config("llama_tiny_cpu.yaml"))
    texts = generated_texts(tokenizer, 5, 40)
    assert texts.tokens.shape == texts.counted.shape == (5, 40)
    assert (texts.tokens[:, 0] == 1).all()
    assert not texts.counted[:, -1].any()
    assert texts.counted[:, :23].all()
    np.testing.assert_array_equal(texts.tokens, generated_texts(tokenizer, 5, 40).tokens)


def test_general_texts_are_documentation_docstrings_and_code() -> None:
    tokenizer = load_tokenizer(load_config("llama_tiny_cpu.yaml"))
    texts = general_texts(tokenizer, 9, 64)
    assert texts.tokens.shape == (9, 64)
    assert texts.counted[:, :-1].all()
    found = [tokenizer.decode(row.tolist()) for row in texts.tokens]
    assert all("#" in page for page in found[0::3])
    assert all(code.lstrip().startswith(("def ", "class ", "@")) for code in found[2::3])
    assert not any("def " in docstring for docstring in found[1::3])
    others = calibration_texts(tokenizer, 9, 64)
    assert not {row.tobytes() for row in texts.tokens} & {row.tobytes() for row in others.tokens}
    with pytest.raises(CheckpointError, match="--texts 1000 needs more"):
        general_texts(tokenizer, 1000, 64)


@pytest.mark.parametrize("family", ["qwen3moe", "qwen2", "phi3", "gpt-oss", "qwen3next", "qwen35moe"])
def test_a_gguf_file_becomes_a_folder_of_the_values_that_it_stores(tmp_path: Path, family: str) -> None:
    """Each family has a special form. Qwen2 has biases, and folders of Phi-3 have joined tensors. In folders of gpt-oss
    and Qwen3.5, one tensor has all experts. Query weights of the last two families also have the rows of gates.
    """
    oracle, file = write_pair(family, "Q4_1", tmp_path)
    write_float_folder(file, tmp_path / "floats", "float32")
    shape = ModelShape.from_path(tmp_path / "floats")
    assert shape == ModelShape.from_path(file)
    specs = [spec for spec in weight_specs(shape) if not spec.packed_only]
    loaded = []
    for path in (oracle, tmp_path / "floats"):
        source = open_weights(path, specs, seed=None, ignorable=ignorable_suffixes(shape))
        loaded.append(load_weights(specs, source, "float32", lambda done, of: None))
        source.close()
    assert loaded[0].keys() == loaded[1].keys()
    for parameter, values in loaded[0].items():
        np.testing.assert_array_equal(loaded[1][parameter], values, parameter)


def test_only_a_gguf_file_has_a_row_of_its_own_format(tmp_path: Path) -> None:
    [of_file] = [each for each in FORMATS if each.as_stored]
    assert not is_available(of_file, Model("llama_tiny_cpu.yaml", "generated", tmp_path))


def test_a_format_above_its_limit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    far = [Quality("int8", 2.0, 0.2, 0.8, 0.01, 1.0)]
    monkeypatch.setattr(quality_gate, "run", lambda *arguments: far)
    assert quality_gate.main(["--formats", "int8"]) == 1


def test_the_tool_starts_alone_and_refuses_an_unknown_format(tmp_path: Path) -> None:
    """Starts the tool as users do. The other run of the tool is forked, because the import of MindSpore is slow."""
    done = run_program(REPOSITORY / "tools/quality_gate.py", "--formats", "int5", folder=tmp_path)
    assert done.returncode == 2
    assert "--formats int5: the formats are bf16, " in done.stderr


def test_perplexity_is_measured_with_the_graph(tmp_path: Path) -> None:
    arguments = ["--config", "llama_tiny_cpu.yaml", "--source", "generated", "--json", str(tmp_path / "gate.json")]
    arguments += ["--formats", "float32", "--texts", "4", "--length", "32"]
    done = run_forked(REPOSITORY / "tools/quality_gate.py", *arguments, folder=REPOSITORY)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "gate.json").read_text())
    assert [row["name"] for row in rows] == ["bf16", "float32"]
    assert rows[0]["agreement"] == 1.0
    assert abs(rows[1]["change"]) < 0.01
    assert rows[1]["agreement"] > 0.95
