"""RotaryCache and PagedAttentionRagged as custom ops of a graph with dynamic shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_custom_ops_in_a_graph(tmp_path: Path) -> None:
    program = Path(__file__).with_name("custom_program.py")
    environment = {name: value for name, value in os.environ.items() if name != "MS_OP_PLUGIN_PATH"}
    process = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False,
        env={**environment, "PYTHONPATH": str(ROOT), "GLOG_v": "3"},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    results = json.loads(process.stdout.strip().splitlines()[-1])
    assert len(results) == 19
    assert [name for name, passed in results.items() if not passed] == []
    for line in (
        "RotaryCache: slot_mapping[0] is 32; it must be from 0 to 31",
        "RotaryCache: positions[0] is 64; it must be from 0 to 63",
        "PagedAttentionRagged: block_tables[0] is 8; it must be from 0 to 7",
        "PagedAttentionRagged: context_lens[0] is 5; block_tables of width 1 and block_size 4 hold 4",
    ):
        assert f"llm_kernels: {line}" in process.stderr
