"""Tests tools/count_schema_tests.py with a small package: every verdict, the optional tests and the exit codes."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tools import count_schema_tests

INTEGER = {"description": "integer", "schema": {"type": "integer"}, "tests": [
    {"description": "one", "data": 1, "valid": True},
    {"description": "text", "data": "x", "valid": False},
    {"description": "fraction", "data": 1.0, "valid": True},
]}  # fmt: skip
REFUSED = {"description": "not", "schema": {"not": {}}, "tests": [{"description": "any", "data": 1, "valid": False}]}
LENIENT = {"description": "lenient", "schema": {}, "tests": [{"description": "any", "data": 1, "valid": False}]}


def package(path: Path, groups: list[dict[str, Any]]) -> Path:
    """Writes a source package with these groups, and with an optional test that must not count."""
    files = {"tests/draft2020-12/a.json": groups, "tests/draft2020-12/optional/b.json": [LENIENT]}
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            data = json.dumps(content).encode()
            member = tarfile.TarInfo(f"jsonschema-1/json/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def test_verdicts_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = package(tmp_path / "a.tar.gz", [INTEGER, REFUSED])
    counts = tmp_path / "counts.json"
    assert count_schema_tests.main(["--package", str(path), "--json", str(counts)]) == 0
    assert json.loads(counts.read_text("utf-8")) == {
        "tests": 4, "right": 2, "schema refused": 1, "too strict": 1, "wrongly accepted": 0
    }  # fmt: skip
    printed = capsys.readouterr().out
    assert 'Unimplemented keys: ["not"]' in printed
    assert "too strict: integer: fraction" in printed


@pytest.mark.parametrize("groups", [[LENIENT], []], ids=["wrongly accepted", "no tests"])
def test_a_wrongly_accepted_value_or_an_empty_suite_fails(tmp_path: Path, groups: list[dict[str, Any]]) -> None:
    assert count_schema_tests.main(["--package", str(package(tmp_path / "a.tar.gz", groups))]) == 1
