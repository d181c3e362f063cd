"""Sends prepared requests over open connections, each request when it is due (open loop)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from performance.load.apis import Api
from performance.load.http_client import ConnectionPool
from performance.load.stream import RequestRecord, StreamExchange

START_DELAY_S = 0.05
"""Seconds from the start of the run to the due time 0. Meanwhile, the pacing thread starts."""
DISPLAY_INTERVAL_S = 0.5
"""Seconds between two updates of the progress."""


@dataclass(frozen=True, slots=True)
class LiveCounts:
    """Counts of requests at a time during a run, for the progress display."""

    elapsed_s: float
    total: int
    in_flight: int
    done: int
    failed: int
    pieces: int
    """Number of streamed pieces received so far. A piece usually has one token."""


Display = Callable[[LiveCounts], None]


class Batch:
    """Sends requests at their due times over ``pool``. ``encode(index)`` returns the bytes of a request.

    A thread waits for the due times, because the timers of an event loop are rounded up to a millisecond and would
    increase every latency. If ``stop`` is set, no more requests are sent, and unfinished requests fail as
    ``interrupted``.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        api: Api,
        arrivals: Sequence[float],
        encode: Callable[[int], bytes],
        timeout_s: float,
        stop: threading.Event,
    ) -> None:
        self._pool = pool
        self._api = api
        self._arrivals = arrivals
        self._encode = encode
        self._timeout_s = timeout_s
        self._stop = stop
        self._active: dict[StreamExchange, asyncio.TimerHandle] = {}
        self._all_sent = False
        self._all_over = asyncio.Event()
        self._failed = 0
        self._finished_pieces = 0
        self.keep_text = False
        """If True, records contain the text of the responses."""
        self.records: list[RequestRecord] = []
        self.start = 0.0

    async def send_all(self, display: Display | None) -> None:
        """Sends all requests. Returns when every request has completed, failed or timed out."""
        loop = asyncio.get_running_loop()
        self.start = perf_counter() + START_DELAY_S
        pacer = threading.Thread(target=self._pace, args=(loop,), name="load-pacer", daemon=True)
        pacer.start()
        await self._wait_for_all(display)
        pacer.join()

    async def _wait_for_all(self, display: Display | None) -> None:
        while not self._all_over.is_set():
            try:
                await asyncio.wait_for(self._all_over.wait(), DISPLAY_INTERVAL_S)
            except asyncio.TimeoutError:
                if self._stop.is_set():
                    self._interrupt()
            if display is not None:
                display(self._counts())

    def _pace(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in the pacing thread: passes each request to the event loop at its due time."""
        for index, arrival in enumerate(self._arrivals):
            delay = self.start + arrival - perf_counter()
            if self._stop.is_set() or (delay > 0 and self._stop.wait(delay)):
                break
            loop.call_soon_threadsafe(self._send, index)
        loop.call_soon_threadsafe(self._sending_ends)

    def _send(self, index: int) -> None:
        self._send_due(index, self.start + self._arrivals[index])

    def _send_due(self, index: int, due: float) -> None:
        record = RequestRecord(index, due=due, sent=perf_counter())
        self.records.append(record)
        exchange = StreamExchange(self._api, record, self._over, keep_text=self.keep_text)
        timer = asyncio.get_running_loop().call_later(self._timeout_s, self._time_out, exchange)
        self._active[exchange] = timer
        self._pool.send(exchange, self._encode(index))

    def _over(self, exchange: StreamExchange) -> None:
        self._active.pop(exchange).cancel()
        self._failed += exchange.record.failure is not None
        self._finished_pieces += len(exchange.record.piece_times)
        self._check_all_over()

    def _sending_ends(self) -> None:
        self._all_sent = True
        self._check_all_over()

    def _check_all_over(self) -> None:
        if self._all_sent and not self._active:
            self._all_over.set()

    def _time_out(self, exchange: StreamExchange) -> None:
        exchange.cancel("timeout", f"no complete response within {self._timeout_s:g} s", perf_counter())

    def _interrupt(self) -> None:
        for exchange in list(self._active):
            exchange.cancel("interrupted", "", perf_counter())

    def _counts(self) -> LiveCounts:
        return LiveCounts(
            elapsed_s=perf_counter() - self.start,
            total=len(self._arrivals),
            in_flight=len(self._active),
            done=len(self.records) - len(self._active) - self._failed,
            failed=self._failed,
            pieces=self._finished_pieces + sum(len(exchange.record.piece_times) for exchange in self._active),
        )
