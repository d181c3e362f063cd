"""Tests recording and replaying the launches of native primitives."""

from __future__ import annotations

from pathlib import Path

from support.forked_programs import run_forked
from support.json_program import printed_json

PROGRAM = Path(__file__).with_name("launches_program.py")


def test_recorded_launches(tmp_path: Path) -> None:
    done = run_forked(PROGRAM, folder=tmp_path)
    results = printed_json(done)
    assert len(results) == 31
    assert [name for name, passed in results.items() if not passed] == []
    assert done.stderr.count("llm_kernels: Gather: indices[1] is 16") == 2
