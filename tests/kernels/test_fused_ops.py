"""The fused custom ops but for attention, in a static graph that uses part of its size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_fused_ops_in_a_graph(tmp_path: Path) -> None:
    program = Path(__file__).with_name("fused_program.py")
    environment = {name: value for name, value in os.environ.items() if name != "MS_OP_PLUGIN_PATH"}
    process = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False,
        env={**environment, "PYTHONPATH": str(ROOT), "GLOG_v": "3"},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    results = json.loads(process.stdout.strip().splitlines()[-1])
    assert len(results) == 5 * 5 + 6
    assert [name for name, passed in results.items() if not passed] == [], process.stderr[-3000:]
    for line in (
        "EmbedTokens: indices[0] is 130; it must be from 0 to 129",
        "LmHead: last_tokens[0] is 1; it must be from 0 to 0",
        "LmHead: argument 4 is a weight of 64 columns and depth 64; it must be of 130 and 64",
    ):
        assert f"llm_kernels: {line}" in process.stderr, process.stderr
