"""How the tests share the machine when several processes run them (``make test`` does)."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
WHOLE_MACHINE = ("executor", "integration", "ipc", "performance", "agent/test_groups.py")
"""They start servers or agents, and look at what all processes have left in /dev/shm: one after the other."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One group of tests is run by one process: a file, or all that look at the whole machine."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        path = item.path.relative_to(HERE).as_posix() if item.path.is_relative_to(HERE) else item.path.name
        group = "machine" if path.startswith(WHOLE_MACHINE) else path
        item.add_marker(pytest.mark.xdist_group(group))
