"""The native primitives through MindSpore graphs, in a process that has the plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_native_primitives_in_a_graph(tmp_path: Path) -> None:
    program = Path(__file__).with_name("native_program.py")
    process = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3"},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    results = json.loads(process.stdout.strip().splitlines()[-1])
    assert len(results) > 80
    assert [name for name, passed in results.items() if not passed] == []
    assert "llm_kernels: Gather: indices[1] is 4; it must be from 0 to 3" in process.stderr
    assert "llm_kernels: FlashAttentionScore: only causal attention" in process.stderr
