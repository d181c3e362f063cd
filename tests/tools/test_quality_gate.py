"""Tests tools/quality_gate.py: its verdicts, and a small run whose model is served in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llm_serving.config import load_config
from llm_serving.engine.tokenizer_backends import load_tokenizer
from llm_serving.errors import ConfigError
from support.small_configs import REPOSITORY
from support.time_limits import time_limit
from tools import quality_gate
from tools.quality_gate import FORMATS, Quality, chosen_formats, held_out_texts, table_line


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
    texts = held_out_texts(tokenizer, 5, 40)
    assert texts.tokens.shape == texts.counted.shape == (5, 40)
    assert (texts.tokens[:, 0] == 1).all()
    assert not texts.counted[:, -1].any()
    assert texts.counted[:, :23].all()
    np.testing.assert_array_equal(texts.tokens, held_out_texts(tokenizer, 5, 40).tokens)


def test_a_format_above_its_limit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    far = [Quality("int8", 2.0, 0.2, 0.8, 0.01, 1.0)]
    monkeypatch.setattr(quality_gate, "run", lambda *arguments: far)
    assert quality_gate.main(["--formats", "int8"]) == 1
    assert quality_gate.main(["--formats", "int5"]) == 2


def test_perplexity_is_measured_with_the_graph(tmp_path: Path) -> None:
    command = [sys.executable, "tools/quality_gate.py", "--formats", "float32", "--texts", "4", "--length", "32"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "gate.json")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=time_limit(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "gate.json").read_text())
    assert [row["name"] for row in rows] == ["bf16", "float32"]
    assert rows[0]["agreement"] == 1.0
    assert abs(rows[1]["change"]) < 0.01
    assert rows[1]["agreement"] > 0.95
