"""Tests the log event of wrong requests: which requests have one, and that it holds no text of the client's prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llm_serving.errors import ContextLengthError, QueueFullError
from llm_serving.server.error_replies import error_reply, note_error
from llm_serving.telemetry.log import EventLog
from support.fake_engine import FakeEngine
from support.http_server import HttpServer

URL = "/v1/completions"
SECRET = "my secret prompt"


def logged(server: HttpServer) -> list[tuple[Any, ...]]:
    names = ("where", "status", "code", "param")
    return [tuple(one[name] for name in names) for one in server.log.named("request_invalid")]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": SECRET, "temperature": 3}, (URL, 400, "invalid_value", "temperature")),
        ({"prompt": {"text": SECRET}}, (URL, 400, "invalid_type", "prompt")),
        ({"prompt": "a", "stop": [SECRET, 1]}, (URL, 400, "invalid_type", "stop")),
        ({"prompt": SECRET, "stream": True, "max_tokens": 10**6}, (URL, 400, "context_length_exceeded", "max_tokens")),
        ({"prompt": SECRET, "model": "other"}, (URL, 404, "model_not_found", "model")),
    ],
)
def test_a_wrong_request_has_one_line_without_its_text(
    server: HttpServer, body: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    assert server.post(URL, body).status_code == expected[1]
    assert logged(server) == [expected]
    assert SECRET not in json.dumps(server.log.events)


def test_broken_json_and_other_types_have_a_line(server: HttpServer) -> None:
    json_type = {"content-type": "application/json"}
    assert server.http.post(URL, content=b'{"prompt": "', headers=json_type).status_code == 400
    assert server.http.post(URL, content=b"a", headers={"content-type": "text/plain"}).status_code == 415
    assert [(status, code) for _, status, code, _ in logged(server)] == [
        (400, "invalid_json"),
        (415, "unsupported_media_type"),
    ]


@pytest.mark.parametrize("more", [{}, {"stream": True}])
def test_the_line_has_the_id_of_the_response(server: HttpServer, more: dict[str, Any]) -> None:
    response = server.post(URL, {"prompt": "a", "max_tokens": 10**6, **more})
    [line] = server.log.named("request_invalid")
    assert line.get("request_id") == response.headers.get("x-request-id")


@pytest.mark.parametrize("more", [{}, {"stream": True}])
@pytest.mark.parametrize("error", [QueueFullError("full"), ContextLengthError("too long")])
def test_a_refusal_of_the_engine_has_one_line(
    server: HttpServer, engine: FakeEngine, error: Exception, more: dict[str, Any]
) -> None:
    engine.refuse = error
    assert server.post(URL, {"prompt": "a", **more}).status_code in (400, 429)
    assert (len(server.log.named("request_refused")), logged(server)) == (1, [])


def test_good_requests_and_unknown_urls_have_no_line(server: HttpServer) -> None:
    assert server.post(URL, {"prompt": "a", "max_tokens": 2}).status_code == 200
    assert server.http.get("/nothing").status_code == 404
    assert logged(server) == []


def test_a_flood_does_not_fill_the_log(tmp_path: Path) -> None:
    path, now = tmp_path / "log", [1000.0]
    error = ContextLengthError("too long", param="prompt")
    with EventLog(path, clock=lambda: now[0]) as log:
        for _ in range(500):
            note_error(log, error, error_reply(error), "/" + "x" * 10_000, None)
        now[0] += 1
        log.event("request_refused", code="queue_full", message="full")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["request_invalid"] * 20 + ["log_lines_suppressed", "request_refused"]
    assert (lines[20]["of"], lines[20]["lines"]) == ("request_invalid", 480)
    assert len(lines[0]["where"]) < 100
