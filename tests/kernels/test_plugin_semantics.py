"""The native primitives against plain NumPy renderings of their documentation, in a process that has the plugin."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.time_limits import time_limit

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("program", "tests"), [("plugin_semantics.py", 23), ("plugin_quantised.py", 30), ("plugin_arithmetic.py", 25)]
)
def test_the_primitives_do_what_their_documentation_says(tmp_path: Path, program: str, tests: int) -> None:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/kernels")))
    process = subprocess.run(
        [sys.executable, "-m", "pytest", str(ROOT / "tests/kernels" / program), "-q", "--no-header",
         "-p", "no:cacheprovider",
         "--import-mode=importlib", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)],
        capture_output=True, text=True, cwd=tmp_path, timeout=time_limit(280), check=False,
        env={**os.environ, "PYTHONPATH": path, "GLOG_v": "3", "MS_OM_PATH": str(tmp_path)},
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-2000:]
    assert re.search(rf"^{tests} passed", process.stdout, re.MULTILINE), process.stdout[-500:]
