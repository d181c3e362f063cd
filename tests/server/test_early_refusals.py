"""Tests that early refusals answer like the normal path, and only requests that the normal path refuses, too.

A URL with a query takes the normal path. So a request with ``?`` shows what the normal path answers.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.errors import QueueFullError
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.server.app import ServerApp
from support.access_keys import access_for, secret_of
from support.fake_engine import FakeEngine
from support.fakes import make_limits, make_request
from support.http_server import HttpServer, http_request, read_response, running, wait_until
from support.time_limits import time_limit

PATH = "/v1/completions"
BODY = json.dumps({"prompt": "a"}).encode()
KEYS = ("alice", "bob", "narrow requests_in_flight=1", "slow requests_per_minute=1")


class Refusing:
    """A server with API keys and an audit log, whose queue is full. Counts the requests that take the normal path."""

    def __init__(self, server: HttpServer, audit: Path, refused: list[str]) -> None:
        self.server, self.audit, self.refused = server, audit, refused
        self.num_normal = 0

    def exchange(self, *requests: bytes) -> list[bytes]:
        """Sends requests on one connection. Returns the responses without the value of ``Date``."""
        found = []
        with self.server.raw(b"") as connection:
            for request in requests:
                connection.sendall(request)
                data = b""
                while (body := data.partition(b"\r\n\r\n"))[1] == b"" or len(body[2]) < _length(body[0]):
                    chunk = connection.recv(65536)
                    assert chunk, data
                    data += chunk
                found.append(re.sub(rb"date: [^\r]*", b"date: ", data))
        return found

    def traces(self, act: Callable[[], list[bytes]]) -> dict[str, Any]:
        """Returns the responses of ``act``, and everything that the server has noted meanwhile."""
        server = self.server
        before, num_lines = _counts(server), len(self.audit.read_text().splitlines())
        server.log.events.clear()
        self.refused.clear()
        server.engine.asked_for.clear()
        responses = act()
        wait_until(lambda: len(self.audit.read_text().splitlines()) == num_lines + len(responses))
        lines = [json.loads(line) for line in self.audit.read_text().splitlines()[num_lines:]]
        for line in lines:
            assert line.pop("duration_ms") >= 0
            assert line.pop("time") > 0
        usage = server.app.state.access
        assert usage is not None
        return {
            "responses": responses,
            "metrics": {name: value - before.get(name, 0.0) for name, value in _counts(server).items()},
            "log": list(server.log.events),
            "audit": lines,
            "refused": list(self.refused),
            "asked for": list(server.engine.asked_for),
            "in flight": {name: usage.usage(name).in_flight for name in ("alice", "narrow", "slow")},
        }


def _length(head: bytes) -> int:
    found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    return 0 if found is None else int(found[1])


def _counts(server: HttpServer) -> dict[str, float]:
    """Returns the server's counters of responses and refusals by name."""
    lines = generate_latest(server.metrics.registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if re.match(r"llm_serving_\w*(http|refused)\w*_total\{", line))
    return {name: float(value) for name, value in pairs}


@contextmanager
def refusing(tokenizer: Tokenizer, folder: Path) -> Iterator[Refusing]:
    audit, refused = folder / "audit.log", []
    access = access_for(folder, *KEYS, audit=audit, refused=refused.append)
    with running(FakeEngine(tokenizer), access) as server:
        yield Refusing(server, audit, refused)


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Refusing]:
    with refusing(tokenizer, tmp_path_factory.mktemp("early")) as found:
        yield found


@pytest.fixture
def rig(shared: Refusing, monkeypatch: pytest.MonkeyPatch) -> Refusing:
    engine = shared.server.engine
    engine.reset()
    shared.num_normal = 0
    call = ServerApp.__call__

    async def counted(self: ServerApp, *arguments: Any) -> None:
        shared.num_normal += 1
        await call(self, *arguments)

    monkeypatch.setattr(ServerApp, "__call__", counted)
    return shared


def request_of(path: str, *headers: str) -> bytes:
    return http_request(path, BODY, *headers)


def key_of(name: str) -> str:
    return f"Authorization: Bearer {secret_of(name)}"


REFUSED = {
    "full queue": (key_of("alice"),),
    "full queue, key in the other header": (f"X-Api-Key: {secret_of('alice')}",),
    "requests in flight": (key_of("narrow"),),
    "requests per minute": (key_of("slow"),),
    "no key": (),
    "wrong key": (key_of("mallory"),),
    "two keys": (key_of("alice"), f"X-Api-Key: {secret_of('alice')}"),
    "full queue, closing": (key_of("alice"), "Connection: close"),
    "full queue, expecting": (key_of("alice"), "Expect: 100-continue"),
}


@pytest.mark.parametrize("path", [PATH, "/v1/messages"])
@pytest.mark.parametrize("headers", REFUSED.values(), ids=REFUSED.keys())
def test_both_paths_answer_and_count_alike(rig: Refusing, headers: tuple[str, ...], path: str) -> None:
    engine, access = rig.server.engine, rig.server.app.state.access
    assert access is not None
    engine.full = QueueFullError("64 requests are waiting and 0 can start", retry_after_s=12.1)
    access.usage("narrow").in_flight = 1
    access.usage("slow")._requests = None
    rig.traces(lambda: rig.exchange(request_of(f"{PATH}?", key_of("slow"))))  # the only request of this minute
    rig.num_normal = 0
    early = rig.traces(lambda: rig.exchange(request_of(path, *headers)))
    assert rig.num_normal == 0
    normal = rig.traces(lambda: rig.exchange(request_of(f"{path}?", *headers)))
    assert rig.num_normal == 1
    assert early == normal
    assert early["responses"][0].startswith((b"HTTP/1.1 429", b"HTTP/1.1 401"))
    assert len(early["audit"]) == 1
    assert sum(early["metrics"].values()) >= 1


def test_an_endpoint_is_refused_early_exactly_if_its_handler_first_checks_the_queue(rig: Refusing) -> None:
    rig.server.engine.full = QueueFullError("full")
    for endpoint in rig.server.app.endpoints:
        if endpoint.method != "POST" or "{" in endpoint.path:
            assert not endpoint.queued, endpoint.path
            continue
        request = http_request(f"{endpoint.path}?", b"{not json", key_of("alice"))
        [response] = rig.exchange(request)
        assert (b'"queue_full"' in response) == endpoint.queued, endpoint.path
        if endpoint.queued:
            rig.num_normal = 0
            assert rig.exchange(http_request(endpoint.path, b"{not json", key_of("alice"))) == [response]
            assert rig.num_normal == 0, endpoint.path


def test_a_light_key_enters_a_full_queue(rig: Refusing, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(make_limits(max_num_seqs=1, max_waiting_requests=4))
    for number in range(5):
        request = make_request(f"heavy-{number}")
        request.tenant = "alice"
        scheduler.add_request(request)
    monkeypatch.setattr(rig.server.engine, "queue_full", scheduler.queue_full)
    assert b"queue_full" in rig.exchange(request_of(PATH, key_of("alice")))[0]
    assert rig.num_normal == 0
    assert rig.exchange(request_of(PATH, key_of("bob")))[0].startswith(b"HTTP/1.1 200")
    assert rig.num_normal == 1


def test_an_accepted_request_counts_once_for_its_key(rig: Refusing) -> None:
    access = rig.server.app.state.access
    assert access is not None
    usage = access.usage("slow")
    usage._requests = None
    traces = rig.traces(lambda: rig.exchange(request_of(PATH, key_of("slow"))))
    assert traces["responses"][0].startswith(b"HTTP/1.1 200")
    assert traces["in flight"]["slow"] == 0
    assert usage._requests is not None
    assert usage._requests._left < 0.99, "one request was taken"
    assert b"rate_limit_exceeded" in rig.exchange(request_of(PATH, key_of("slow")))[0]


def test_a_connection_serves_on_after_an_early_refusal(rig: Refusing) -> None:
    engine = rig.server.engine
    engine.full = QueueFullError("full")
    large = http_request(PATH, json.dumps({"prompt": "a" * 50_000}).encode(), key_of("alice"))
    assert [one[:12] for one in rig.exchange(large, large)] == [b"HTTP/1.1 429"] * 2
    engine.full = None
    assert rig.exchange(large, request_of(PATH, key_of("alice")))[1].startswith(b"HTTP/1.1 200")


@contextmanager
def held_loop(server: HttpServer) -> Iterator[None]:
    """Keeps the server from reading until the end of the context."""
    is_held, may_continue = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        assert may_continue.wait(time_limit(10))

    server._loop.call_soon_threadsafe(hold)
    assert is_held.wait(time_limit(10))
    try:
        yield
    finally:
        may_continue.set()


def burst(rig: Refusing, *requests: bytes) -> list[int]:
    """Sends requests on connections of their own, so that the server reads them together. Returns the statuses."""
    with ExitStack() as opened:
        connections = [opened.enter_context(rig.server.raw(request_of(PATH))) for _ in requests]
        assert {read_response(connection)[0] for connection in connections} == {401}  # all connections are accepted
        with held_loop(rig.server):
            for connection, request in zip(connections, requests, strict=True):
                connection.sendall(request)
        return [read_response(connection)[0] for connection in connections]


@pytest.fixture
def places(rig: Refusing, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The queue has this many places for requests that have not ended. The list also gets the number of expected
    requests in each call of ``engine.open``.
    """
    engine, found = rig.server.engine, [2]
    open_request = engine.open

    def queue_full(tenant: str = "", num_expected: int = 0) -> QueueFullError | None:
        return QueueFullError("full") if engine.num_open + num_expected >= found[0] else None

    def opened(*arguments: Any, **options: Any) -> Any:
        found.append(rig.server.app.state.expected.num)
        return open_request(*arguments, **options)

    monkeypatch.setattr(engine, "queue_full", queue_full)
    monkeypatch.setattr(engine, "open", opened)
    return found


VALID = request_of(PATH, key_of("alice"))
INVALID = http_request(PATH, b"{not json", key_of("alice"))
STREAMED = http_request(
    PATH, json.dumps({"prompt": "a", "stream": True}).encode(), key_of("alice"), "Connection: close"
)


@pytest.mark.parametrize("request_", [VALID, STREAMED], ids=["whole", "streamed"])
def test_requests_of_a_burst_count_before_the_engine_knows_them(
    rig: Refusing, places: list[int], request_: bytes
) -> None:
    assert sorted(burst(rig, *[request_] * 6)) == [200, 200, 429, 429, 429, 429]
    assert rig.num_normal == 2, "the other requests are refused early"
    assert places[1:] == [1, 0], "a request is no longer expected when the engine knows it"


def test_a_beam_search_is_no_longer_expected_when_the_engine_knows_it(
    rig: Refusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, found = rig.server.engine, []
    search = engine.search

    async def searched(*arguments: Any, **options: Any) -> Any:
        found.append(rig.server.app.state.expected.num)
        return await search(*arguments, **options)

    monkeypatch.setattr(engine, "search", searched)
    body = json.dumps({"prompt": "a", "use_beam_search": True}).encode()
    assert burst(rig, http_request(PATH, body, key_of("alice"))) == [200]
    assert found == [0]


def test_a_request_that_does_not_reach_the_engine_keeps_no_place(rig: Refusing, places: list[int]) -> None:
    assert burst(rig, INVALID, INVALID, VALID) == [400, 400, 429]
    with rig.server.raw(VALID[:-1]), rig.server.raw(VALID[:-1]):  # the last byte of the body does not arrive
        wait_until(lambda: rig.num_normal == 4)
        wait_until(lambda: rig.server.app.state.expected.num == 0)
        assert burst(rig, VALID, VALID) == [200, 200]


def test_a_client_that_wants_to_close_is_disconnected(rig: Refusing) -> None:
    rig.server.engine.full = QueueFullError("full")
    with rig.server.raw(request_of(PATH, key_of("alice"), "Connection: close")) as connection:
        data = b""
        while chunk := connection.recv(65536):
            data += chunk
    assert b"\r\nconnection: close\r\n" in data


UNUSUAL = {
    "web page": (request_of(PATH, key_of("alice"), "Origin: http://127.0.0.1"), b"HTTP/1.1 429"),
    "foreign page": (request_of(PATH, key_of("alice"), "Origin: http://evil.example"), b"HTTP/1.1 403"),
    "foreign host": (request_of(PATH, key_of("alice"), "Host: evil.example"), b"HTTP/1.1 403"),
    "HTTP/1.0": (request_of(PATH, key_of("alice")).replace(b"HTTP/1.1", b"HTTP/1.0"), b"HTTP/1.1 429"),
    "other method": (http_request(PATH, b"", key_of("alice"), method="GET"), b"HTTP/1.1 405"),
    "other path": (request_of("/v1/completion", key_of("alice")), b"HTTP/1.1 404"),
}


@pytest.mark.parametrize(("request_", "start"), UNUSUAL.values(), ids=UNUSUAL.keys())
def test_unusual_requests_take_the_normal_path(rig: Refusing, request_: bytes, start: bytes) -> None:
    rig.server.engine.full = QueueFullError("full")
    assert rig.exchange(request_)[0].startswith(start)
    assert rig.num_normal == 1


def test_requests_that_arrive_together_with_a_refused_one_are_not_answered(rig: Refusing) -> None:
    """A client that waits for responses does not send them, and a burst of refusals would hold the event loop."""
    refused = b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 0\r\n\r\n" % PATH.encode()
    with rig.server.raw(refused * 20) as connection:
        data = b""
        while chunk := connection.recv(65536):
            data += chunk
    assert data.count(b"HTTP/1.1 401 ") == data.count(b"HTTP/1.1 ") == 1
    assert rig.num_normal == 0
