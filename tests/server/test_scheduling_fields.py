"""Tests priority, objectives, deadline, tenant and cache salt.

Each can be a field of the body or a header, on every route.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from llm_serving.errors import DeadlineExceededError, QueueFullError
from llm_serving.request import SchedulingParams
from support.fake_engine import MODEL_NAME
from support.http_server import http_request, read_response, running
from support.time_limits import time_limit

DIALECTS = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/generate", {"inputs": "a"}),
    (f"/models/{MODEL_NAME}/generate", {"inputs": "a"}),
    ("/chat", {"query": "a"}),
]
STREAMS = [("/generate_stream", {"inputs": "a"}), ("/stream_chat_post", {"query": "a"})]
TERMS = {"priority": -3, "ttft_objective_ms": 250, "tbt_objective_ms": 12.5, "deadline_ms": 4000}
HEADERS = {"X-Priority": "7", "X-TTFT-Objective-Ms": "500", "X-TBT-Objective-Ms": "25.5", "X-Deadline-Ms": "1e3"}


def terms(scheduling: SchedulingParams) -> tuple[Any, ...]:
    return (scheduling.priority, scheduling.ttft_objective, scheduling.tbt_objective, scheduling.deadline)


@pytest.mark.parametrize(("path", "body"), DIALECTS)
def test_fields_and_headers(server, engine, path, body):
    plain = server.post(path, body)
    by_field = server.post(path, {**body, **TERMS})
    by_header = server.http.post(path, json=body, headers=HEADERS)
    by_both = server.http.post(path, json={**body, "priority": 0, "deadline_ms": 2000}, headers=HEADERS)
    assert {response.status_code for response in (plain, by_field, by_header, by_both)} == {200}
    assert [terms(request.scheduling) for request in engine.submitted] == [
        (0, None, None, None),
        (-3, 0.25, 0.0125, 4.0),
        (7, 0.5, 0.0255, 1.0),
        (0, 0.5, 0.0255, 2.0),
    ]


@pytest.mark.parametrize(("path", "body"), DIALECTS)
def test_a_request_names_a_pool(server, engine, path, body):
    assert server.post(path, {**body, "pool": "long"}).status_code == 200
    assert engine.submitted[0].scheduling.pool == "long"


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_streams_accept_the_scheduling_fields(server, engine, path, body):
    server.events(path, {**body, **TERMS})
    assert terms(engine.submitted[0].scheduling) == (-3, 0.25, 0.0125, 4.0)


@pytest.mark.parametrize(
    ("body", "headers", "param", "text"),
    [
        ({"priority": 2**31}, {}, "priority", "should be less than or equal to 2147483647; got 2147483648."),
        ({"priority": "high"}, {}, "priority", "should be a valid integer; got \"high\"."),
        ({"ttft_objective_ms": 0}, {}, "ttft_objective_ms", "should be greater than 0; got 0."),
        ({"tbt_objective_ms": -1}, {}, "tbt_objective_ms", "should be greater than 0; got -1."),
        ({"deadline_ms": 1e9}, {}, "deadline_ms", "should be less than or equal to 86400000; got 1000000000.0."),
        ({"cache_salt": ""}, {}, "cache_salt", "should have at least 1 character; got \"\"."),
        ({"cache_salt": 5}, {}, "cache_salt", "should be a valid string; got 5."),
        ({"pool": ""}, {}, "pool", "should have at least 1 character; got \"\"."),
        ({}, {"X-Priority": "high"}, "X-Priority", "should be a valid integer"),
        ({}, {"X-Deadline-Ms": "soon"}, "X-Deadline-Ms", "should be a valid number"),
        ({}, {"X-TTFT-Objective-Ms": "inf"}, "X-TTFT-Objective-Ms", "should be a finite number"),
        ({}, {"X-TBT-Objective-Ms": "0"}, "X-TBT-Objective-Ms", "should be greater than 0"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(server, engine, body, headers, param, text):
    response = server.http.post("/v1/completions", json={"prompt": "a", **body}, headers=headers)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param
    assert error["message"].startswith(f"'{param}' {text}")
    assert engine.submitted == []


def authorized(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_tenant_is_the_hash_of_its_key_and_the_key_is_nowhere(server, engine):
    for headers in ({}, authorized("sk-one"), authorized("sk-two"), {"authorization": "bearer  sk-one"},
                    {"Authorization": "Basic sk-one"}):  # fmt: skip
        assert server.http.post("/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 200
    none, one, two, again, basic = (request.scheduling.tenant for request in engine.submitted)
    assert (none, basic) == ("", "")
    assert one == again != two
    assert len(one) == len(two) == 16
    arrivals = server.log.named("request_arrival")
    assert [arrival.get("tenant") for arrival in arrivals] == [None, one, two, one, None]
    assert "sk-" not in json.dumps(server.log.events)


def salts(server, engine, *requests):
    engine.submitted.clear()
    for body, headers in requests:
        server.http.post("/v1/completions", json={"prompt": "a", **body}, headers=headers)
    return [request.scheduling.cache_salt for request in engine.submitted]


MIXED = (({}, {}), ({}, authorized("k")), ({"cache_salt": "x"}, {}), ({"cache_salt": "x"}, authorized("k")),
         ({"cache_salt": "y"}, {}), ({}, authorized("l")), ({"cache_salt": "x"}, authorized("l")))  # fmt: skip


def test_requests_share_the_cache_unless_their_salts_differ(server, engine):
    plain, key, salt, salt_and_key, other_salt, other_key, salt_and_other = salts(server, engine, *MIXED)
    assert plain == key == other_key == b""
    assert salt == salt_and_key == salt_and_other
    assert len({plain, salt, other_salt}) == 3


def test_tenants_may_be_kept_apart(tokenizer, engine):
    with running(engine, cache_salt="tenant") as server:
        made = salts(server, engine, *MIXED)
    assert made[0] == b""
    assert len(set(made)) == len(made)
    assert all(len(salt) == 16 for salt in made[1:])


@pytest.mark.parametrize(("path", "body"), DIALECTS)
def test_a_full_queue_refuses_before_anything_is_read(server, engine, path, body):
    engine.full = QueueFullError("1024 requests are waiting")
    response = server.http.post(path, content=b"{not json", headers={"Content-Type": "application/json"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"] == {
        "message": "1024 requests are waiting", "type": "rate_limit_error", "param": None, "code": "queue_full",
    }  # fmt: skip
    assert engine.submitted == []
    assert [refused["code"] for refused in server.log.named("request_refused")] == ["queue_full"]
    engine.full = None
    assert server.post(path, body).status_code == 200, "the connection still serves"


def test_a_large_body_of_a_refused_request_does_not_disturb_the_next(server, engine):
    engine.full = QueueFullError("full")
    body = json.dumps({"prompt": "a" * 50_000}).encode()
    start = time.monotonic()
    with server.raw(http_request("/v1/completions", body)[:1000]) as connection:
        assert read_response(connection)[0] == 429
        assert time.monotonic() - start < time_limit(0.5)
        engine.full = None
        connection.sendall(http_request("/v1/completions", body)[1000:])
        connection.sendall(http_request("/v1/completions", json.dumps({"prompt": "a"}).encode()))
        assert read_response(connection)[0] == 200


@pytest.mark.parametrize(("seconds", "header"), [(0.2, "1"), (1.0, "1"), (12.1, "13")])
def test_retry_after_is_the_expected_queue_time(server, engine, seconds, header):
    engine.refuse = QueueFullError("full", retry_after_s=seconds)
    assert server.post("/v1/completions", {"prompt": "a"}).headers["retry-after"] == header


@pytest.mark.parametrize("stream", [False, True])
def test_a_dropped_request_is_a_504_that_clients_do_not_repeat(server, engine, stream):
    engine.drop = "the deadline passed 5 ms ago"
    response = server.post("/v1/completions", {"prompt": "a", "stream": stream, "deadline_ms": 1})
    assert response.status_code == 504
    assert response.headers["x-should-retry"] == "false"
    assert "retry-after" not in response.headers
    assert response.json()["error"] == {
        "message": "the deadline passed 5 ms ago", "type": "server_error", "param": "deadline_ms",
        "code": "deadline_exceeded",
    }  # fmt: skip


def test_a_deadline_passed_before_the_queue(server, engine):
    engine.refuse = DeadlineExceededError("the deadline was 1 ms after the request's arrival", param="deadline_ms")
    assert server.post("/chat", {"query": "a", "deadline_ms": 1}).status_code == 504
    [refused] = server.log.named("request_refused")
    assert refused["code"] == "deadline_exceeded"


def test_the_scheduling_fields_are_in_the_log(server):
    server.post("/generate", {"inputs": "a", **TERMS})
    [arrival] = server.log.named("request_arrival")
    assert {key: arrival[key] for key in TERMS} == TERMS


def test_the_headers_are_in_the_openapi_document(server):
    paths = server.http.get("/openapi.json").json()["paths"]

    def headers(path: str) -> list[str]:
        parameters = paths[path]["post"].get("parameters", [])
        return [parameter["name"] for parameter in parameters if parameter["in"] == "header"]

    for path in (*(path for path, _ in (*DIALECTS, *STREAMS)),):
        assert headers(path.replace(MODEL_NAME, "{name}")) == [*HEADERS, "X-Session-Id"]
    assert headers("/tokenize") == []
