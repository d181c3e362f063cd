"""Tests the native primitives in MindSpore graphs. A separate process has the plugin."""

from __future__ import annotations

from pathlib import Path

from support.forked_programs import run_forked
from support.json_program import printed_json

PROGRAM = Path(__file__).with_name("native_program.py")


def test_native_primitives_in_a_graph(tmp_path: Path) -> None:
    done = run_forked(PROGRAM, folder=tmp_path)
    results = printed_json(done)
    assert len(results) > 80
    assert [name for name, passed in results.items() if not passed] == []
    assert "llm_kernels: Gather: indices[1] is 4; it must be from 0 to 3" in done.stderr
    assert "llm_kernels: FlashAttentionScore: only causal attention" in done.stderr
