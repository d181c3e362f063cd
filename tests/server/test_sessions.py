"""Tests of the endpoints for sessions over HTTP, with an engine that has no KV tiers."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest

from llm_serving.errors import CheckpointError, RequestError
from llm_serving.server.http.lifecycle import ReadAhead
from llm_serving.server.sessions import endpoints
from support.access_keys import access_for, bearer
from support.fake_engine import FakeEngine
from support.http_server import http_request, running, wait_until
from support.time_limits import time_limit

BODY = {"Content-Type": "application/octet-stream"}


@pytest.fixture(scope="module")
def keyed(tokenizer, tmp_path_factory):
    """Provides a server with keys. Alice's key may export and import sessions, and bob's key may not."""
    access = access_for(tmp_path_factory.mktemp("keys"), "alice sessions", "bob")
    with running(FakeEngine(tokenizer), access) as server:
        yield server


def test_the_tokens_of_the_last_request_are_the_session(server):
    body = {"prompt": "a", "session_id": "one"}
    server.post("/v1/completions", body)
    server.http.post("/v1/completions", json={"prompt": "a b c"}, headers={"X-Session-Id": "one"})
    [shown] = [one for one in server.http.get("/v1/sessions").json()["data"] if one["id"] == "one"]
    assert shown["tokens"] == len(server.engine.submitted[-1].prompt_token_ids)
    assert server.http.get("/v1/sessions/one").json()["error"]["code"] == "sessions_off"
    assert server.http.delete("/v1/sessions/one").json()["deleted"] is True
    assert server.http.get("/v1/sessions/one").status_code == 404


@pytest.mark.parametrize("name", ["", "a b", ".a", "a" * 129, "a/b", "é"])
def test_an_id_that_is_no_id_is_refused(server, name):
    response = server.post("/v1/completions", {"prompt": "a", "session_id": name})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "session_id")


def test_a_key_sees_only_its_own_sessions(keyed):
    keyed.http.post("/v1/completions", json={"prompt": "a", "session_id": "s"}, headers=bearer("bob"))
    assert keyed.http.get("/v1/sessions", headers=bearer("alice")).json()["data"] == []
    assert keyed.http.get("/v1/sessions/s", headers=bearer("alice")).status_code == 404
    assert keyed.http.delete("/v1/sessions/s", headers=bearer("alice")).status_code == 404
    assert len(keyed.http.get("/v1/sessions", headers=bearer("bob")).json()["data"]) == 1


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_files_need_a_right_of_the_key(keyed, method):
    refused = keyed.http.request(method, "/v1/sessions/s", headers={**bearer("bob"), **BODY})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_permitted")
    allowed = keyed.http.request(method, "/v1/sessions/s", headers={**bearer("alice"), **BODY})
    assert allowed.status_code != 403


def ended(identity):
    """Returns a future that has ended with the identity of blocks."""
    future = Future()
    future.set_result(identity)
    return future


@pytest.fixture
def tiers(server, monkeypatch):
    """Provides KV tiers whose nodes never compare their weights, for the server's session ``one``."""
    server.post("/v1/completions", {"prompt": "a", "session_id": "one"})
    made = SimpleNamespace(read_identity=partial(ended, None), waits_for_nodes=True, weights_bytes=0)
    monkeypatch.setattr(server.engine, "tiers", made)
    monkeypatch.setattr(server.engine, "transfers", SimpleNamespace())
    monkeypatch.setattr(endpoints, "_POLL_S", 0.001)
    return made


def asked(server, method="GET"):
    answer = server.http.request(method, "/v1/sessions/one", headers=BODY)
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_sessions_wait_for_the_weights_of_nodes_for_a_limited_time(server, tiers, method):
    assert asked(server, method) == (503, "weights_unknown")


class Reading:
    """KV tiers whose nodes need a number of polls to read their weights."""

    def __init__(self, num_polls, weights_bytes):
        self.left, self.weights_bytes, self.read_identity = num_polls, weights_bytes, partial(ended, None)

    @property
    def waits_for_nodes(self):
        self.left -= 1
        return self.left >= 0


@pytest.mark.parametrize(("method", "gigabytes", "is_known"), [("GET", 0, False), ("PUT", 9, False), ("GET", 9, True)])
def test_exports_wait_longer_for_large_weights(server, tiers, monkeypatch, method, gigabytes, is_known):
    """An import may not, because its body must arrive."""
    monkeypatch.setattr(server.engine, "tiers", Reading(endpoints._MAX_POLLS, gigabytes * 10**9))
    monkeypatch.setattr(endpoints, "_POLLS_PER_GB", 1000)  # the machine may be slow, and its time counts
    monkeypatch.setattr(server.engine, "config", None, raising=False)
    monkeypatch.setattr(endpoints, "SessionExport", lambda *arguments: SimpleNamespace(pieces=no_pieces))
    answer = server.http.request(method, "/v1/sessions/one", headers=BODY)
    assert answer.status_code == (200 if is_known else 503)
    assert is_known or f"({gigabytes}.0 GB)" in answer.json()["error"]["message"]


async def no_pieces():
    for each in ():
        yield each


@pytest.mark.parametrize("error", [None, CheckpointError("the weights have changed")])
def test_sessions_wait_for_the_weights_of_the_server_for_a_limited_time(server, tiers, error):
    """The thread that reads the weights goes on, and a later call gets its result."""
    future = Future()
    tiers.read_identity = lambda: future
    assert asked(server) == (503, "weights_unknown")
    if error is None:
        future.set_result(None)
        assert asked(server) == (503, "weights_unknown"), "the nodes are still reading"
    else:
        future.set_exception(error)
        assert asked(server) == (503, "weights_changed")


def test_only_a_few_exports_may_wait_for_the_digest_of_the_weights(server, tiers, monkeypatch):
    """Others would occupy all threads that parse request bodies."""
    started, future = threading.Semaphore(0), Future()
    monkeypatch.setattr(endpoints, "_POLL_S", time_limit(60) / endpoints._MAX_POLLS)

    def read_identity():
        started.release()
        return future

    tiers.read_identity = read_identity
    with ThreadPoolExecutor(endpoints.MAX_TRANSFERS) as threads:
        waiting = [threads.submit(asked, server) for _ in range(endpoints.MAX_TRANSFERS)]
        try:
            for _ in waiting:
                assert started.acquire(timeout=time_limit(20))
            assert asked(server) == (503, "overloaded")
        finally:
            monkeypatch.setattr(endpoints, "_POLL_S", 0.001)
            future.set_result(None)
        assert [each.result() for each in waiting] == [(503, "weights_unknown")] * len(waiting)


async def endless_pieces():
    yield b"head"
    await asyncio.Event().wait()  # stands for blocks that the agents do not deliver


def num_transfers(server, status):
    """Returns the number of exports and imports that have ended with a status."""
    labels = {"route": "/v1/sessions/{session_id}", "status": str(status)}
    return server.app.state.metrics.registry.get_sample_value("llm_serving_http_responses_total", labels) or 0


@pytest.mark.parametrize("place", ["weights", "file"])
def test_an_export_ends_when_its_client_closes_the_connection(server, tiers, monkeypatch, place):
    """Otherwise a few clients that have left would keep all others from exporting sessions."""
    book, before = server.app.state.sessions, num_transfers(server, 499)
    monkeypatch.setattr(endpoints, "_POLL_S", time_limit(60) / endpoints._MAX_POLLS)
    if place == "weights":
        tiers.read_identity = Future
    else:
        tiers.waits_for_nodes = False
        monkeypatch.setattr(server.engine, "config", None, raising=False)
        monkeypatch.setattr(endpoints, "SessionExport", lambda *arguments: SimpleNamespace(pieces=endless_pieces))
    with server.raw(http_request("/v1/sessions/one", b"", method="GET")) as connection:
        if place == "file":
            assert connection.recv(12) == b"HTTP/1.1 200"
        wait_until(lambda: book.num_transfers == 1)
    wait_until(lambda: book.num_transfers == 0)
    wait_until(lambda: num_transfers(server, 499) == before + 1)
    assert server.log.named("internal_error") == []


class StuckImport:
    """An import that never ends to process the first piece of its file."""

    def __init__(self, *arguments):
        pass

    async def feed(self, piece):
        await asyncio.Event().wait()  # stands for blocks that the agents do not take


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("place", ["weights", "blocks"])
def test_an_import_ends_when_its_client_closes_the_connection(server, tiers, monkeypatch, place, is_whole):
    """Otherwise a few clients that have left would keep all others from importing sessions."""
    book, before = server.app.state.sessions, num_transfers(server, 499)
    monkeypatch.setattr(endpoints, "_POLL_S", time_limit(60) / endpoints._MAX_POLLS)
    monkeypatch.setattr(server.engine, "config", None, raising=False)
    monkeypatch.setattr(endpoints, "SessionImport", StuckImport)
    if place == "weights":
        tiers.read_identity = Future
    else:
        tiers.waits_for_nodes, tiers.block_bytes = False, 1
    file = bytes(300_000)
    request = http_request("/v1/sessions/one", file, f"Content-Type: {BODY['Content-Type']}", method="PUT")
    with server.raw(request if is_whole else request[:-1000]):
        wait_until(lambda: book.num_transfers == 1)
    wait_until(lambda: book.num_transfers == 0)
    wait_until(lambda: num_transfers(server, 499) == before + 1)
    assert server.log.named("internal_error") == []


class Collected:
    """An import that keeps the pieces of its file."""

    def __init__(self, *arguments):
        self.pieces = []

    async def feed(self, piece):
        self.pieces.append(piece)
        await asyncio.sleep(0.001)
        return True

    def finish(self):
        raise RequestError(f"{len(self.pieces) > 1} {hashlib.sha256(b''.join(self.pieces)).hexdigest()}")


def test_an_import_that_reads_ahead_gets_its_whole_file_in_order(server, tiers, monkeypatch):
    """The file is larger than the part that may be read ahead."""
    tiers.waits_for_nodes, tiers.block_bytes = False, 1
    monkeypatch.setattr(server.engine, "config", None, raising=False)
    monkeypatch.setattr(endpoints, "SessionImport", Collected)
    monkeypatch.setattr(endpoints, "READ_AHEAD_BYTES", 100_000)
    file = random.Random(7).randbytes(3_000_000)
    answer = server.http.put("/v1/sessions/one", content=file, headers=BODY)
    assert answer.json()["error"]["message"] == f"True {hashlib.sha256(file).hexdigest()}"


def test_a_body_is_read_ahead_up_to_a_limit():
    """The rest stays in the connection, so that a fast client cannot fill the memory."""
    messages = [{"type": "http.request", "body": bytes(40), "more_body": number < 9} for number in range(10)]
    waiting = iter([*messages, {"type": "http.disconnect"}])
    num_read = 0

    async def receive():
        nonlocal num_read
        num_read += 1
        return next(waiting)

    async def run():
        body = ReadAhead(receive, 100)
        watcher = asyncio.ensure_future(until_disconnect(body.watch))
        await asyncio.sleep(0.01)
        assert (num_read, body.is_complete) == (3, False)
        received = [await body.receive() for _ in messages]
        assert [(len(each["body"]), each["more_body"]) for each in received] == [(40, True)] * 9 + [(40, False)]
        await watcher
        assert body.is_complete

    async def until_disconnect(watch):
        while (await watch())["type"] != "http.disconnect":
            pass

    asyncio.run(run())
