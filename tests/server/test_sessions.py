"""Tests of the endpoints for sessions over HTTP, with an engine that has no KV tiers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from llm_serving.server.sessions import endpoints
from support.access_keys import access_for, bearer
from support.fake_engine import FakeEngine
from support.http_server import running
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


@pytest.fixture
def tiers(server, monkeypatch):
    """Provides KV tiers whose nodes never compare their weights, for the server's session ``one``."""
    server.post("/v1/completions", {"prompt": "a", "session_id": "one"})
    made = SimpleNamespace(identity=lambda: None, waits_for_nodes=True)
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


def test_only_a_few_exports_may_wait_for_the_digest_of_the_weights(server, tiers):
    """Others would occupy all threads that parse request bodies."""
    started, go_on = threading.Semaphore(0), threading.Event()

    def identity():
        started.release()
        go_on.wait(time_limit(60))

    tiers.identity = identity
    with ThreadPoolExecutor(endpoints.MAX_TRANSFERS) as threads:
        waiting = [threads.submit(asked, server) for _ in range(endpoints.MAX_TRANSFERS)]
        try:
            for _ in waiting:
                assert started.acquire(timeout=time_limit(20))
            assert asked(server) == (503, "overloaded")
        finally:
            go_on.set()
        assert [each.result() for each in waiting] == [(503, "weights_unknown")] * len(waiting)
