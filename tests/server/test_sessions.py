"""Tests of the endpoints for sessions over HTTP, with an engine that has no KV tiers."""

from __future__ import annotations

import pytest

from support.access_keys import access_for, bearer
from support.fake_engine import FakeEngine
from support.http_server import running

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
