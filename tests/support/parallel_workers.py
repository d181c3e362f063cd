"""Saves processor time in the processes of pytest-xdist: fewer reports, early imports, a faster search for tests."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.python import importtestmodule
from _pytest.runner import runtestprotocol

LONG_S = 0.05
"""Seconds from which on the set-up or the removal of fixtures is reported, so that ``--durations`` lists it."""


class FewReports:
    """A plugin that sends one report for a test that passes, instead of three and a message at its start.

    A report costs a millisecond of processor time in both processes, which is more than most tests need.
    """

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        for report in needed_reports(runtestprotocol(item, log=False, nextitem=nextitem)):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


def needed_reports(reports: Sequence[pytest.TestReport]) -> list[pytest.TestReport]:
    """Returns the reports of a test that say something: all of a test that fails or is skipped.

    For a test that passes, returns the report of its call, and the reports of a long set-up and of a long removal.
    """
    if not all(report.passed for report in reports):
        return list(reports)
    return [report for report in reports if report.when == "call" or report.duration >= LONG_S]


class IndexedNames(list[str]):
    """A list of different names in which ``index`` needs no search.

    pytest-xdist calls ``index`` for each test. A search through the names of all tests takes a second in total.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self._places = {name: place for place, name in enumerate(self)}

    def index(self, name: str, *_: Any) -> int:
        return self._places[name]


def import_early(config: pytest.Config, folder: Path) -> None:
    """Imports all test files in a folder from the last one, so that pytest's collection finds them imported.

    Leaves out folders with a ``pytest.ini`` of their own. The collection imports a file again whose import fails here,
    and reports the error.
    """
    for file in sorted(folder.rglob("test_*.py"), reverse=True):
        if (file.parent / "pytest.ini").exists():
            continue
        try:
            importtestmodule(file, config)
        except (Exception, pytest.skip.Exception):
            for name, module in list(sys.modules.items()):
                if getattr(module, "__file__", None) == str(file):
                    del sys.modules[name]
