"""Tests the program that writes an EAGLE-3 head for a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from performance.models.eagle_head import main
from support.small_configs import TINY_LLAMA
from support.step_config import make_config


def test_a_config_accepts_the_head_of_its_model(tmp_path: Path) -> None:
    assert main([str(TINY_LLAMA), str(tmp_path / "head")]) == 0
    settings = {"speculative_config.method": "eagle", "speculative_config.model": tmp_path / "head"}
    config = make_config(TINY_LLAMA, "float32", "fused", extra=settings)
    assert config.draft is not None
    assert config.draft.head is not None
    assert config.draft.shape.intermediate_size == config.shape.intermediate_size
    assert config.draft.shape.max_positions == config.shape.max_positions


def test_a_missing_model_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none"), str(tmp_path / "head")]) == 2
    assert "there is no model" in capsys.readouterr().err
