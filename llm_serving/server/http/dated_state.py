"""The headers that every response has: the time in ``Date``."""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import formatdate

from uvicorn.server import ServerState

Headers = list[tuple[bytes, bytes]]


class DatedState(ServerState):
    """uvicorn's state of all connections. Its default headers have the present time.

    A request reads ``default_headers`` when its headers are complete. uvicorn renews the time with a timer, which wakes
    the event loop of an idle server. This class renews the time when the headers are read.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """``clock`` returns the present Unix time."""
        self._clock = clock
        self._second = -1
        self._headers: Headers = []
        super().__init__()

    @property
    def default_headers(self) -> Headers:
        """The default headers of a response that begins now. The caller must not change the list."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._headers = second, [(b"date", formatdate(second, usegmt=True).encode("ascii"))]
        return self._headers

    @default_headers.setter
    def default_headers(self, _: Headers) -> None:
        """Does nothing. The constructor of the base class sets an empty list."""
