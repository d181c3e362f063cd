"""Sends far more requests than a server can serve, with several API keys, and uses little processor time.

Server and client share the cores, so this client does only the work that the measured figures need. It makes the bytes
of all requests before the run. From a response it reads only the status, the times of the first and last event, and the
end. Events after the first one do not wake the client. It reads them in intervals, because the kernel notes when bytes
arrive.
"""

from __future__ import annotations

import asyncio
import resource
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import cycle
from time import perf_counter, process_time

import msgspec
import uvloop

from performance.load.arrivals import poisson_arrivals, request_count
from performance.load.endpoint import Endpoint
from performance.load.garbage import frozen_objects
from performance.load.timed_socket import TimedSocket
from performance.load.workload import token_workload
from performance.program import LoadTestError, Range

TICK_S = 0.001
"""Minimum seconds between two times at which the client sends the due requests."""
SWEEP_S = 0.05
"""Seconds after which the client reads all streams again whose first event has arrived."""
PREPARED = 256
"""Number of different requests that are prepared for each key. The client sends them repeatedly, in the same order."""
VOCABULARY = 1000
"""Number of different tokens in prompts."""
DRAIN_S = 90.0
"""Maximum number of seconds from the last request to the end of the last response."""
OPEN_FILES = 16384
"""Limit of open files that the client sets for its process, if the system allows it."""

_END = b"\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class KeyLoad:
    """The load of one API key: ``rate`` requests per second at random times (a Poisson process)."""

    name: str
    secret: str
    rate: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """The smallest and largest number of prompt tokens, and of output tokens, of a request."""

    prompt: Range
    output: Range


@dataclass(slots=True)
class Result:
    """A request and its response. Times are seconds of ``perf_counter``."""

    key: str
    due: float
    max_tokens: int
    sent: float = 0.0
    status: int = 0
    code: str = ""
    """The code of an error, for example ``queue_full``. Empty if there was no error."""
    first: float | None = None
    """Time at which the first event arrived. None if no event arrived."""
    end: float | None = None
    """Time at which the response ended. None if it did not end."""

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first is None else 1e3 * (self.first - self.sent)

    @property
    def response_ms(self) -> float | None:
        """Milliseconds from the write of the request to the end of the response. None if the response did not end."""
        return None if self.end is None else 1e3 * (self.end - self.sent)

    def is_good(self, ttft_ms: float, tpot_ms: float) -> bool:
        """Returns True if the response is complete and meets both objectives (time to first token, time per token)."""
        if self.first is None or self.end is None or self.code or self.status != 200:
            return False
        per_token = 1e3 * (self.end - self.first) / max(self.max_tokens - 1, 1)
        return 1e3 * (self.first - self.sent) <= ttft_ms and per_token <= tpot_ms


@dataclass(frozen=True, slots=True)
class FloodRun:
    """The requests of a run with their responses, and the processor time that the client used."""

    results: list[Result]
    start: float
    duration_s: float
    client_cpu_s: float
    lateness_ms: list[float]
    """Milliseconds from the due time of each request to its write, sorted."""

    def goodput(self, ttft_ms: float, tpot_ms: float, settle_s: float) -> float:
        """Returns the goodput: how many requests per second meet both objectives.

        A request counts if it ended between ``settle_s`` and ``duration_s`` seconds after the start of the run.
        """
        begin, end = self.start + settle_s, self.start + self.duration_s
        good = sum(
            one.is_good(ttft_ms, tpot_ms) for one in self.results if one.end is not None and begin <= one.end <= end
        )
        return good / (end - begin)


def run_flood(
    endpoint: Endpoint, model: str, loads: Sequence[KeyLoad], lengths: Lengths, duration_s: float, seed: int
) -> FloodRun:
    """Sends the requests of all keys for ``duration_s`` seconds, and waits for the responses.

    Raises LoadTestError if a connection failed, or if a response did not end.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return uvloop.run(_Flood(endpoint, model, lengths).run(loads, duration_s, seed))


@dataclass(frozen=True, slots=True)
class _Prepared:
    data: bytes
    max_tokens: int


class _Flood:
    """Sends the requests of one run in an event loop."""

    def __init__(self, endpoint: Endpoint, model: str, lengths: Lengths) -> None:
        self._endpoint = endpoint
        self._model = model
        self._lengths = lengths
        self._idle: deque[_Connection] = deque()
        self._open: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._streams: set[_Connection] = set()
        """Connections with a response whose first event has arrived. The event loop does not watch their sockets."""
        self._next_sweep = 0.0
        self.failures: list[str] = []

    async def run(self, loads: Sequence[KeyLoad], duration_s: float, seed: int) -> FloodRun:
        arrivals = deque(merge(*(self._arrivals(load, duration_s, seed + i) for i, load in enumerate(loads))))
        requests = {load.name: cycle(self._requests(load, seed + i)) for i, load in enumerate(loads)}
        results: list[Result] = []
        with frozen_objects():
            cpu, start = process_time(), perf_counter()
            while arrivals:
                now = perf_counter() - start
                while arrivals and arrivals[0][0] <= now:
                    due, key = arrivals.popleft()
                    request = next(requests[key])
                    results.append(Result(key, start + due, request.max_tokens))
                    self._send(results[-1], request.data)
                self._sweep()
                if arrivals:
                    wakeup = min(start + arrivals[0][0], self._next_sweep)
                    await asyncio.sleep(max(TICK_S, wakeup - perf_counter()))
            await self._drain(results)
            cpu = process_time() - cpu
        for connection in list(self._open):
            connection.close()
        self._check(results)
        lateness = sorted(1e3 * (one.sent - one.due) for one in results)
        return FloodRun(results, start, duration_s, cpu, lateness)

    def release(self, connection: _Connection, *, reusable: bool) -> None:
        """Called after a response. Adds the connection to the idle connections if ``reusable``, otherwise closes it."""
        self._streams.discard(connection)
        if reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def streams(self, connection: _Connection) -> None:
        """Called at the first event of a response. From now on, ``_sweep`` reads the response."""
        self._streams.add(connection)

    def forget(self, connection: _Connection) -> None:
        """Removes a closed connection."""
        self._open.discard(connection)
        self._streams.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _send(self, result: Result, data: bytes) -> None:
        if self._idle:
            self._idle.pop().send(result, data)
            return
        task = asyncio.get_running_loop().create_task(self._send_on_new(result, data))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _send_on_new(self, result: Result, data: bytes) -> None:
        connection = _Connection(self)
        try:
            connection.socket = await TimedSocket.connect(self._endpoint.host, self._endpoint.port, connection)
        except OSError as error:
            self.failures.append(f"no connection: {error}")
            return
        self._open.add(connection)
        connection.send(result, data)

    async def _drain(self, results: Sequence[Result]) -> None:
        until = perf_counter() + DRAIN_S
        while perf_counter() < until and any(one.end is None for one in results) and not self.failures:
            await asyncio.sleep(SWEEP_S)
            self._sweep()

    def _sweep(self) -> None:
        """Reads all streams, if ``SWEEP_S`` seconds have passed since they were read."""
        now = perf_counter()
        if now < self._next_sweep:
            return
        self._next_sweep = now + SWEEP_S
        for connection in list(self._streams):
            connection.read()

    def _check(self, results: Sequence[Result]) -> None:
        unfinished = sum(one.end is None for one in results)
        failed = [f"{one.status} {one.code}" for one in results if one.status not in (200, 429) or "error" in one.code]
        problems = [*self.failures, *failed] + ([f"{unfinished} responses did not end"] if unfinished else [])
        if problems:
            raise LoadTestError(f"requests failed for other reasons than rejection: {problems[0]} (of {len(problems)})")

    def _arrivals(self, load: KeyLoad, duration_s: float, seed: int) -> Iterable[tuple[float, str]]:
        count = request_count(load.rate, duration_s)
        return ((due, load.name) for due in poisson_arrivals(count, duration_s, seed))

    def _requests(self, load: KeyLoad, seed: int) -> list[_Prepared]:
        workload = token_workload(PREPARED, seed, self._lengths.prompt, self._lengths.output, VOCABULARY)
        return [_Prepared(self._bytes(load, one.token_ids or (), one.max_tokens), one.max_tokens) for one in workload]

    def _bytes(self, load: KeyLoad, token_ids: Sequence[int], max_tokens: int) -> bytes:
        body = msgspec.json.encode(
            {"model": self._model, "prompt": token_ids, "max_tokens": max_tokens, "temperature": 0.0, "stream": True,
             "ignore_eos": True}
        )  # fmt: skip
        head = (
            f"POST {self._endpoint.prefix}/v1/completions HTTP/1.1\r\nHost: {self._endpoint.authority}\r\n"
            f"Authorization: Bearer {load.secret}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        )
        return head.encode() + b"\r\n" + body


class _Connection:
    """A connection with at most one request at a time."""

    __slots__ = ("_data", "_flood", "_result", "socket")

    def __init__(self, flood: _Flood) -> None:
        self._flood = flood
        self._result: Result | None = None
        self._data = b""
        self.socket: TimedSocket | None = None

    def send(self, result: Result, data: bytes) -> None:
        assert self.socket is not None
        self._result, self._data = result, b""
        result.sent = perf_counter()
        self.socket.write(data)

    def read(self) -> None:
        if self.socket is not None:
            self.socket.read()

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
        self._flood.forget(self)

    def received(self, data: bytes, now: float) -> None:
        result = self._result
        if result is None:
            self.close()
        elif result.status == 200:
            self._stream(result, data, now)
        else:
            self._data += data
            self._head(result, now)

    def lost(self, error: OSError | None, now: float) -> None:
        self._flood.forget(self)
        if self._result is not None:
            self._flood.failures.append(f"the connection was lost: {error or 'closed by the server'}")

    def _head(self, result: Result, now: float) -> None:
        head, separator, body = self._data.partition(b"\r\n\r\n")
        if not separator:
            return
        status = int(head[9:12])
        if status == 200:
            result.status = status
            self._data = b""
            self._stream(result, body, now)
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if len(body) < length:
            return
        result.status, result.code = status, _code(body)
        self._done(result, now, reusable=b"connection: close" not in head.lower())

    def _stream(self, result: Result, data: bytes, now: float) -> None:
        if not data:
            return
        if result.first is None:
            result.first = now
            self._watch(is_watched=False)
            self._flood.streams(self)
        if b'"error":{' in data:
            result.code = f"error in a stream: {_code(data)}"
        self._data = (self._data + data)[-len(_END) :]
        if self._data == _END:
            self._done(result, now, reusable=True)

    def _done(self, result: Result, now: float, *, reusable: bool) -> None:
        result.end = now
        self._result = None
        self._watch(is_watched=True)
        self._flood.release(self, reusable=reusable)

    def _watch(self, *, is_watched: bool) -> None:
        if self.socket is not None:
            self.socket.watch(is_watched=is_watched)


def _code(body: bytes) -> str:
    return body.partition(b'"code":"')[2].partition(b'"')[0].decode()
