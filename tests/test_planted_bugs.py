"""Tests that each planted bug of ``tests/long/find_planted_bugs.py`` still changes one place of the code.

This file must not be in a package that the program runs, because the test fails in a copy with a planted bug.
"""

from __future__ import annotations

import runpy

from support.small_configs import REPOSITORY


def test_the_code_has_the_text_that_each_bug_changes_once() -> None:
    """The search takes more than half an hour, and would stop at a bug whose text was changed."""
    bugs = runpy.run_path(str(REPOSITORY / "tests/long/planted_bugs.py"))["BUGS"]
    texts = {bug.file: (REPOSITORY / bug.file).read_text(encoding="utf-8") for bug in bugs}
    assert [bug.name for bug in bugs if texts[bug.file].count(bug.old) != 1] == []
