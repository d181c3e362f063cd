"""Tests the audit of packages. It passes only if every package was compared with the security advisories."""

from __future__ import annotations

import json
import sys

import pytest

from tools.audit_packages import Audit, AuditError, audit, report

SAFE = {"name": "jinja2", "version": "3.1.6", "vulns": []}
UNSAFE = {
    "name": "wheel",
    "version": "0.45.1",
    "vulns": [{"id": "CVE-2026-24049", "fix_versions": ["0.46.2"], "aliases": [], "description": ""}],
}
SKIPPED = {"name": "numpy", "skip_reason": "Dependency not found on PyPI and could not be audited: numpy (1.26.4)"}


def audit_of(tmp_path, output, error=""):
    """Returns the result of an audit in which ``output`` replaces the output of pip-audit."""
    program = f"import sys; sys.stdout.write({output!r}); sys.stderr.write({error!r})"
    return audit(tmp_path / "some.lock", (sys.executable, "-c", program))


@pytest.mark.parametrize(
    ("packages", "code"), [([SAFE], 0), ([SAFE, UNSAFE], 1), ([SAFE, SKIPPED], 2), ([UNSAFE, SKIPPED], 2)]
)
def test_the_exit_code_says_what_is_proved(tmp_path, capsys, packages, code):
    result = audit_of(tmp_path, json.dumps({"dependencies": packages, "fixes": []}))
    assert report("requirements.lock", result) == code
    said = capsys.readouterr().out
    assert ("wheel 0.45.1: CVE-2026-24049, fixed in 0.46.2" in said) == (UNSAFE in packages)
    assert ("1 packages were not checked" in said) == (code == 2)


def test_no_report_is_an_error_with_the_last_line(tmp_path):
    with pytest.raises(AuditError, match="Failed to connect to pypi"):
        audit_of(tmp_path, "", "Traceback\nFailed to connect to pypi\n")


def test_packages_that_others_pin_are_reported_and_not_counted(capsys):
    assert report("requirements-mindformers.lock", Audit(("nltk 3.9.1: X-1, fixed in 3.9.2",), ())) == 0
    assert "nltk 3.9.1" in capsys.readouterr().out
