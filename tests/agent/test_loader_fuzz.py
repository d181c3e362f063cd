"""Tests that damaged model folders of every format are refused. tests/long/fuzz_loader.py runs many more cases."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from llm_serving.formats import safetensors_index
from support.fuzzing import Findings
from support.loader_fuzz import FORMATS, LoaderFuzz


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_folder_is_read_or_refused(tmp_path: Path, name: str) -> None:
    findings = Findings()
    LoaderFuzz(name, tmp_path).run(range(40), findings)
    assert findings.crashes == {}
    assert findings.is_good
    assert findings.refused > 0


def test_a_missing_check_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the check of tensor extents is removed, the fuzz cases find a reader that accepts a tensor outside its file.
    """
    monkeypatch.setattr(safetensors_index, "_check_extents", lambda path, tensors, data_bytes: None)
    findings = Findings()
    LoaderFuzz("safetensors", tmp_path).run(range(300), findings)
    assert not findings.is_good


def test_a_kept_case_is_the_case_that_ran(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    fuzz = LoaderFuzz("gguf q8_0", tmp_path / "work")
    fuzz.keep_case(7, tmp_path / "first")
    fuzz.keep_case(7, tmp_path / "second")
    damaged = (tmp_path / "first" / "model.gguf").read_bytes()
    assert damaged == (tmp_path / "second" / "model.gguf").read_bytes()
    assert damaged != (tmp_path / "work" / "model.gguf").read_bytes()
    assert struct.unpack("<4s", (tmp_path / "work" / "model.gguf").read_bytes()[:4]) == (b"GGUF",)
