"""Calls a function repeatedly on the event loop, for example to look for changed files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PERIOD_S = 1.0
"""Seconds between two calls of the function, for example between two looks for a changed key file."""


class Periodic:
    """Calls ``action`` every ``PERIOD_S`` seconds between ``start`` and ``stop``. ``action`` must not raise."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._run)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self._action()
        self.start()
