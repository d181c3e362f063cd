"""Tests the check for packages at the start of a program.

If a package is missing, the program reports the package and ends. It does not fail with a traceback.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from llm_serving.commands import own_python
from support.small_configs import REPOSITORY
from support.time_limits import time_limit


def test_missing_packages_are_an_error_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(own_python, "VENV_PYTHON", tmp_path_factory.mktemp("none") / "bin" / "python")
    own_python.use_own_python()
    with pytest.raises(SystemExit) as ended:
        own_python.use_own_python((*own_python.SERVING, "no_package_of_this_name"))
    assert ended.value.code == 2
    assert "run: make setup" in capsys.readouterr().err


@pytest.mark.skipif(not own_python.VENV_PYTHON.is_file(), reason="needs .venv")
@pytest.mark.parametrize("tool", ["quantize", "check_ascend_graph", "try_attention", "replay"])
def test_a_tool_finds_the_packages_of_the_project(tool: str) -> None:
    """The option -S hides all installed packages, as a Python outside of ``.venv`` does."""
    command = [sys.executable, "-S", f"tools/{tool}.py", "--help"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=time_limit(60))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {tool}.py")
