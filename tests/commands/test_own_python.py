"""Tests the check for packages at the start of a program.

If a package is missing, the program reports the package and ends. It does not fail with a traceback.
"""

from __future__ import annotations

import pytest

from llm_serving.commands import own_python


def test_missing_packages_are_an_error_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(own_python, "VENV_PYTHON", tmp_path_factory.mktemp("none") / "bin" / "python")
    own_python.use_own_python()
    with pytest.raises(SystemExit) as ended:
        own_python.use_own_python((*own_python.SERVING, "no_package_of_this_name"))
    assert ended.value.code == 2
    assert "run: make setup" in capsys.readouterr().err
