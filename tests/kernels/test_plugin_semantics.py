"""Compares the native primitives with NumPy versions of their documentation. A separate process has the plugin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.forked_programs import run_forked

ROOT = Path(__file__).resolve().parents[2]
PYTEST = Path(pytest.__file__).with_name("__main__.py")
PROGRAMS = (
    *("plugin_semantics.py", "plugin_quantised.py", "plugin_arithmetic.py", "plugin_latent.py", "plugin_sinks.py"),
    "plugin_draws.py",
)
NUM_TESTS = 32 + 32 + 42 + 11 + 13 + 30


def test_the_primitives_do_what_their_documentation_says(tmp_path: Path) -> None:
    files = [str(ROOT / "tests/kernels" / program) for program in PROGRAMS]
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "-o", "pythonpath=. tests tests/kernels"]
    project = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    process = run_forked(PYTEST, *files, *options, *project, folder=tmp_path, timeout=280, MS_OM_PATH=str(tmp_path))
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-2000:]
    assert re.search(rf"^{NUM_TESTS} passed", process.stdout, re.MULTILINE), process.stdout[-500:]
