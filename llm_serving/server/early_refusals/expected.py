"""Counts requests that were not refused early, and that will probably be passed to the engine soon.

The headers of requests that arrive together are processed before the first of these requests is passed to the engine.
Without this count, all of them would find the same free place in the queue, and all but one would be refused late. A
late refusal takes several times as long as an early refusal, because the body is read first.
"""

from __future__ import annotations

import asyncio

from starlette.types import Scope

EXPECTED = "llm_serving.expected"
"""Key of the ASGI scope for the ``ExpectedRequest`` of a request that was not refused early."""
MAX_TURNS = 4
"""Number of iterations of the event loop for which a request is expected.

A request with a short body is passed to the engine in the second iteration. If it takes longer, the request waits for
example for the rest of its body, which may never arrive. So it must not keep a place in the queue.
"""


class ExpectedRequests:
    """The number of expected requests. Use it only in the event loop's thread."""

    def __init__(self) -> None:
        self.num = 0

    def expect(self, scope: Scope) -> None:
        """Counts a request until it is passed to the engine, until its response, or for ``MAX_TURNS`` iterations."""
        scope[EXPECTED] = ExpectedRequest(self)


class ExpectedRequest:
    """One request that counts in ``ExpectedRequests``."""

    __slots__ = ("_requests", "_turns_left")

    def __init__(self, requests: ExpectedRequests) -> None:
        self._requests: ExpectedRequests | None = requests
        self._turns_left = MAX_TURNS
        requests.num += 1
        asyncio.get_running_loop().call_soon(self._note_turn)

    def end(self) -> None:
        """Counts the request no longer. May be called more than once."""
        if self._requests is not None:
            self._requests.num -= 1
            self._requests = None

    def _note_turn(self) -> None:
        if self._requests is None:
            return
        self._turns_left -= 1
        if self._turns_left:
            asyncio.get_running_loop().call_soon(self._note_turn)
        else:
            self.end()


def end_expectation(scope: Scope) -> None:
    """Ends the expectation of a request whose response is complete, if the request still has one."""
    expected: ExpectedRequest | None = scope.pop(EXPECTED, None)
    if expected is not None:
        expected.end()
