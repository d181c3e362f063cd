"""How the tests share the machine when several processes run them (``make test`` does)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.time_limits import time_limit

WHOLE_MACHINE = ("tests/executor", "tests/integration", "tests/ipc", "tests/performance", "tests/agent/test_groups")
"""They start servers or agents, and look at what all processes have left in /dev/shm: one after the other."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A process runs whole files, so that what a file sets up is set up once, and one runs all of ``WHOLE_MACHINE``."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "machine" if nodeid.startswith(WHOLE_MACHINE) else nodeid.partition("::")[0]

    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Scales the time limit of a test to the machine, before pytest-timeout reads it."""
    if item.config.getoption("timeout") is None:
        mark = item.get_closest_marker("timeout")
        seconds = float(mark.args[0] if mark else item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(time_limit(seconds)), append=False)
    yield
