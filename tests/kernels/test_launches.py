"""Launches of native primitives, recorded while MindSpore makes them, and replayed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_recorded_launches(tmp_path: Path) -> None:
    program = Path(__file__).with_name("launches_program.py")
    process = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3"},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    results = json.loads(process.stdout.strip().splitlines()[-1])
    assert len(results) == 17
    assert [name for name, passed in results.items() if not passed] == []
    assert process.stderr.count("llm_kernels: Gather: indices[1] is 16") == 2
