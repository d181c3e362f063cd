"""Tests the tool that compares attention on a device with NumPy. It passes on the CPU and finds a planted mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.forked_programs import run_forked
from support.time_limits import time_limit

ROOT = Path(__file__).resolve().parents[2]
PLANTED = """
import sys
sys.path.insert(0, {root!r})
from tools import try_attention
real = try_attention.make_cells

def turned(*given, **named):
    from agent.backends.native import attention
    attention._ROTATE_HALVES = 3
    return real(*given, **named)

try_attention.make_cells = turned
sys.exit(try_attention.main(["--device", "CPU"]))
"""
"""A program that runs the tool with a planted mistake: it rotates neighbouring elements together instead of the two
halves.
"""


@pytest.mark.parametrize(("head_dim", "cache"), [(128, ()), (32, ("--int8-cache",))])
def test_the_cpu_agrees_with_numpy(tmp_path: Path, head_dim: int, cache: tuple[str, ...]) -> None:
    arguments = ("--device", "CPU", "--head-dim", str(head_dim), *cache)
    process = run_forked(
        ROOT / "tools/try_attention.py", *arguments, folder=tmp_path, timeout=240, TMPDIR=str(tmp_path)
    )
    assert process.returncode == 0, process.stdout + process.stderr[-2000:]
    lines = [line.split(",")[0] for line in process.stdout.splitlines() if line.startswith(("ok", "FAIL"))]
    assert lines == [f"ok   {kind}: head size {head_dim}" for kind in ("prefill", "decode", "chunked")]


def test_a_planted_mistake_is_found(tmp_path: Path) -> None:
    program = tmp_path / "planted.py"
    program.write_text(PLANTED.format(root=str(ROOT)))
    process = run_forked(program, folder=ROOT, timeout=120)
    assert process.returncode == 1, process.stdout + process.stderr[-2000:]
    assert process.stdout.count("FAIL") == 3


def test_without_an_ascend_the_tool_says_why() -> None:
    process = subprocess.run(
        [sys.executable, str(ROOT / "tools/try_attention.py")],
        capture_output=True, text=True, cwd=ROOT, check=False, timeout=time_limit(120),
    )  # fmt: skip
    assert process.returncode == 1
    assert "FAIL MindSpore cannot use Ascend device 0: Unsupported device target" in process.stdout
