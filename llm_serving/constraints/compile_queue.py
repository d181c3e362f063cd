"""Limits how many grammars are compiled at the same time. Further compilations wait, and tenants take turns.

A compilation may take a second. Without turns, the compilations of one tenant would delay those of all others.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from llm_serving.errors import QueueFullError

MAX_COMPILING = 2
"""Maximum number of grammars that are compiled at the same time. Further grammars wait."""
MAX_WAITING_OF_TENANT = 256
"""Maximum number of grammars of one tenant that wait to be compiled."""
MAX_WAITING = 1024
"""Maximum number of grammars of all tenants together that wait to be compiled."""


class CompileQueue:
    """The waiting compilations of all models of a server. Only its event loop may use it."""

    def __init__(self) -> None:
        self._num_running = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """The waiting compilations of each tenant. The first tenant is the next one."""

    @property
    def num_waiting(self) -> int:
        """The number of compilations that wait."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Waits until a compilation of ``tenant`` may begin. The compilation must run in the ``async with`` block.

        The caller may cancel the wait, but not a compilation, because its thread cannot be ended. Raises QueueFullError
        if too many compilations wait.
        """
        await self._turn(tenant)
        try:
            yield
        finally:
            self._end()

    async def _turn(self, tenant: str) -> None:
        """Waits until a compilation of ``tenant`` may begin."""
        if self._num_running < MAX_COMPILING:
            self._num_running += 1
            return
        self._check_limits(tenant)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._remove(tenant, turn)
            elif turn.exception() is None:  # the caller was cancelled after it had got its place
                self._end()
            raise

    def _check_limits(self, tenant: str) -> None:
        """Raises QueueFullError if a further compilation of ``tenant`` may not wait.

        If the total is at its maximum, another tenant with many waiting compilations makes space. So a few tenants
        cannot fill the queue. A tenant makes space only if it then still has at least as many as ``tenant``.
        """
        own, total = len(self._waiting.get(tenant, ())), self.num_waiting
        if own >= MAX_WAITING_OF_TENANT:
            raise QueueFullError(
                f"{own} grammars of this client wait to be compiled, which is the maximum. Try again later."
            )
        if total < MAX_WAITING:
            return
        full = f"{total} grammars wait to be compiled, which is the maximum. Try again later."
        largest = max(self._waiting.values(), key=len, default=deque())
        if own + 1 >= len(largest):
            raise QueueFullError(full)
        newest = largest.pop()
        if not newest.done():
            newest.set_exception(QueueFullError(full))

    def _remove(self, tenant: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(tenant, deque())
        if turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[tenant]

    def _end(self) -> None:
        """Gives the place of a compilation that has ended to the next tenant. This tenant is then the last one."""
        while self._waiting:
            tenant, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns
            if not turn.done():  # a cancelled turn leaves the queue a little later
                turn.set_result(None)
                return
        self._num_running -= 1
