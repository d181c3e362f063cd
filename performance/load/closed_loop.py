"""Runs clients in a closed loop: each sends its next request when its previous one has completed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from time import perf_counter

import uvloop

from performance.load.batch import Batch, Display
from performance.load.client import LoadClient, LoadRun
from performance.load.options import LoadOptions
from performance.load.stream import StreamExchange
from performance.load.workload import LoadRequest

__all__ = ["run_closed_loop"]


class ClosedLoopBatch(Batch):
    """Keeps ``clients`` requests running until every request is sent. The due time of a request is its send time.

    After ``enough`` is set, no more requests are sent, and those that run complete.
    """

    clients = 1
    enough: threading.Event | None = None

    async def send_all(self, display: Display | None) -> None:
        self.start = perf_counter()
        self._next = 0
        for _ in range(self.clients):
            self._send_next()
        await self._wait_for_all(display)

    def _send_next(self) -> None:
        if not self._has_ended:
            self._next += 1
            self._send_due(self._next - 1, perf_counter())

    def _over(self, exchange: StreamExchange) -> None:
        # The event loop sends the next request. With direct calls, a server that rejects every request would cause an
        # endless recursion.
        asyncio.get_running_loop().call_soon(self._continue)
        super()._over(exchange)

    def _continue(self) -> None:
        self._send_next()
        self._all_sent = self._has_ended
        self._check_all_over()

    @property
    def _has_ended(self) -> bool:
        """True if no more requests are sent."""
        is_enough = self.enough is not None and self.enough.is_set()
        return is_enough or self._next == len(self._arrivals) or self._stop.is_set()


class ClosedLoopClient(LoadClient):
    """A load client that sends given requests in a closed loop."""

    def __init__(
        self,
        options: LoadOptions,
        requests: Sequence[LoadRequest],
        clients: int,
        display: Display | None,
        enough: threading.Event | None = None,
    ) -> None:
        super().__init__(options, display)
        self._requests = list(requests)
        self._clients = clients
        self._enough = enough

    def _workload(self) -> list[LoadRequest]:
        return self._requests

    def _measured_batch(self, requests: Sequence[LoadRequest]) -> Batch:
        batch = ClosedLoopBatch(
            self._pool,
            self._api,
            [0.0] * len(requests),
            self._encoder(requests),
            self._options.timeout_s,
            self._stop,
        )
        batch.clients, batch.keep_text, batch.enough = self._clients, self._options.keep_text, self._enough
        return batch


def run_closed_loop(
    options: LoadOptions,
    requests: Sequence[LoadRequest],
    clients: int,
    display: Display | None = None,
    enough: threading.Event | None = None,
) -> LoadRun:
    """Sends ``requests`` in order, ``clients`` at a time. After ``enough`` is set, sends no more of them.

    Raises ``LoadTestError`` if the run cannot start.
    """
    return uvloop.run(ClosedLoopClient(options, requests, clients, display, enough).run())
