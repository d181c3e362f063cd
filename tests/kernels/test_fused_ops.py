"""Tests the fused custom operators, except attention, in a static graph whose steps are smaller than its arrays."""

from __future__ import annotations

from pathlib import Path

from support.forked_programs import run_forked
from support.json_program import printed_json

PROGRAM = Path(__file__).with_name("fused_program.py")


def test_fused_ops_in_a_graph(tmp_path: Path) -> None:
    done = run_forked(PROGRAM, folder=tmp_path, MS_OP_PLUGIN_PATH=None)
    results = printed_json(done)
    assert len(results) == 5 * 5 + 6
    assert [name for name, passed in results.items() if not passed] == [], done.stderr[-3000:]
    for line in (
        "EmbedTokens: indices[0] is 130; it must be from 0 to 129",
        "LmHead: last_tokens[0] is 1; it must be from 0 to 0",
        "LmHead: argument 4 is a weight of 64 columns and depth 64; it must be of 130 and 64",
    ):
        assert f"llm_kernels: {line}" in done.stderr, done.stderr
