"""docs/configuration.md is what the code says."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

from llm_serving.config.schema import key_info, section_keys
from llm_serving.config.sections import SECTIONS

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "configuration.md"
TOOL = REPOSITORY / "tools" / "write_configuration_docs.py"


def test_page_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, str(TOOL), "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_key_has_a_row() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    names = [row.split("`")[1] for row in rows]
    expected = [key for cls in SECTIONS.values() for key in section_keys(cls)]
    assert names[: len(expected)] == expected


def test_every_field_of_a_section_is_a_declared_key_with_meaning_and_default() -> None:
    for cls in SECTIONS.values():
        for declared in fields(cls):
            info = key_info(declared)
            assert info is not None, declared.name
            assert info.meaning.endswith("."), declared.name
            assert declared.default is not MISSING, declared.name
            assert bool(info.null) == ("None" in str(declared.type)), declared.name
