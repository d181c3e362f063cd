"""Tests the requests whose grammars wait to be compiled."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import pytest
from starlette.datastructures import Headers

from llm_serving.constraints import compile_queue
from llm_serving.server.generation.scheduling import tenant_name
from support.fake_engine import FakeEngine
from support.http_server import HttpServer

REQUESTS = {
    "/v1/completions": {"prompt": "Once"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Once"}]},
}


@pytest.mark.parametrize("path", REQUESTS)
def test_a_grammar_waits_for_the_turn_of_its_tenant(
    server: HttpServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    queue = server.app.state.compile_queue
    tenants, place = [], queue.place

    def noted(tenant: str) -> AbstractAsyncContextManager[None]:
        tenants.append(tenant)
        return place(tenant)

    monkeypatch.setattr(queue, "place", noted)
    engine.say("hello to the bird")
    for key in ("one", "two"):
        body = REQUESTS[path] | {"structured_outputs": {"regex": f" ?hello.*|{path}{key}"}}
        reply = server.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
        assert reply.status_code == 200, reply.text
    assert tenants == [tenant_name(None, Headers({"authorization": f"Bearer {key}"})) for key in ("one", "two")]


@pytest.mark.parametrize("path", REQUESTS)
def test_a_request_is_refused_if_too_many_grammars_wait(
    server: HttpServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    body = REQUESTS[path] | {"structured_outputs": {"regex": f" ?hello.*|{path} again"}}
    engine.say("hello to the bird")
    with monkeypatch.context() as full:
        full.setattr(compile_queue, "MAX_COMPILING", 0)
        full.setattr(compile_queue, "MAX_WAITING_OF_TENANT", 0)
        reply = server.post(path, body)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["type"]) == (429, "queue_full", "rate_limit_error")
        assert "wait to be compiled" in error["message"]
        assert int(reply.headers["Retry-After"]) >= 1
    assert server.post(path, body).status_code == 200
