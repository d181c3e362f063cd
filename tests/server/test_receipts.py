"""Tests the receipt of a request.

It is in the response if requested, or available by the request's id, but only to the user that sent the request.
"""

from __future__ import annotations

import pytest

from support.http_server import http_request, wait_until

CHAT = {"messages": [{"role": "user", "content": "a"}]}
PARTS_MS = {"tokenise": 1.0, "queue": 2.0, "prefill": 4.0, "decode": 8.0, "preempted": 16.0, "swapped": 32.0,
            "restarted": 0.0, "delivery": 64.0}  # fmt: skip
ALICE, BOB = {"Authorization": "Bearer alice"}, {"Authorization": "Bearer bob"}


def sequence(request_id: str, **changes: object) -> dict[str, object]:
    """Returns the JSON of the receipt that the fake engine gives each request."""
    return {
        "request_id": request_id, "state": "done", "finish_reason": "stop", "priority": 0, "replica": 0,
        "prompt_tokens": 2, "cached_tokens": 2, "output_tokens": 6,
        "e2e_ms": 127.0, "ttft_ms": 7.0, "tpot_ms": 2.0, "parts_ms": PARTS_MS,
        "prefill_chunks": 3, "preemptions": 1, "swaps": 2,
        "blocked": [{"reason": "blocks", "times": 5, "ms": 1.5}], "blocked_by": ["cmpl-other"], **changes,
    }  # fmt: skip


def test_the_parts_add_up():
    assert sum(PARTS_MS.values()) == sequence("a")["e2e_ms"]


def test_a_completion_contains_its_receipt(server):
    answer = server.post("/v1/completions", {"prompt": "a", "return_receipt": True}).json()
    assert answer["receipt"] == {"id": answer["id"], "sequences": [sequence(answer["id"], state="delivery")]}
    assert "receipt" not in server.post("/v1/completions", {"prompt": "a"}).json()


def test_each_of_several_answers_has_a_receipt(server):
    answer = server.post("/v1/completions", {"prompt": "a", "n": 3, "return_receipt": True}).json()
    names = [f"{answer['id']}-{index}" for index in range(3)]
    assert [one["request_id"] for one in answer["receipt"]["sequences"]] == names
    wait_until(lambda: server.engine.num_open == 0)
    whole = server.http.get(f"/requests/{answer['id']}").json()
    assert whole == {"id": answer["id"], "sequences": [sequence(name) for name in names]}
    assert server.http.get(f"/requests/{names[1]}").json()["sequences"] == [sequence(names[1])]


@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)])
def test_the_receipt_is_in_the_last_chunk_of_a_stream(server, path, body, more):
    *chunks, last, done = server.events(path, {**body, "stream": True, "return_receipt": True, **more})
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    [receipt] = last["receipt"]["sequences"]
    assert (receipt["request_id"], receipt["parts_ms"]) == (last["id"], PARTS_MS)
    assert not any("receipt" in chunk for chunk in chunks)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/generate", {"inputs": "a"}), ("/chat", {"query": "a"})]
)
def test_in_the_answers_of_the_other_dialects(server, path, body):
    response = server.post(path, {**body, "return_receipt": True})
    [receipt] = response.json()["receipt"]["sequences"]
    assert (receipt["request_id"], receipt["parts_ms"]) == (response.headers["x-request-id"], PARTS_MS)


@pytest.mark.parametrize(
    ("path", "body"), [("/generate_stream", {"inputs": "a"}), ("/stream_chat_post", {"query": "a"})]
)
def test_in_the_last_event_of_the_other_dialects(server, path, body):
    *events, last = server.events(path, {**body, "return_receipt": True})
    assert last["receipt"]["sequences"][0]["parts_ms"] == PARTS_MS
    assert not any("receipt" in event for event in events)


def test_the_receipt_of_a_running_request_is_available(server, engine):
    engine.delay_s = 5
    with server.raw(http_request("/v1/completions", b'{"prompt": "a"}')):
        wait_until(lambda: bool(engine.submitted))
        name = engine.submitted[0].request_id
        [receipt] = server.http.get(f"/requests/{name}").json()["sequences"]
        assert receipt == sequence(name, state="decode", finish_reason=None, output_tokens=0)


def test_operators_see_all_requests(server):
    answer = server.post("/v1/completions", {"prompt": "a"}).json()
    wait_until(lambda: server.engine.num_open == 0)
    assert server.http.get("/requests").json() == {"requests": [{"tenant": "", **sequence(answer["id"])}]}
    for limit in ("0", "501", "x", "-1", "1e2", "9" * 400, ""):
        refused = server.http.get("/requests", params={"limit": limit})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")
    assert len(server.http.get("/requests?limit=1").json()["requests"]) == 1


def test_an_unknown_id_is_refused(server):
    response = server.http.get("/requests/cmpl-0")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "request_not_found")
    assert '"cmpl-0"' in response.json()["error"]["message"]


def test_the_receipt_of_a_key_is_for_that_key(server):
    def status(name: str, headers: dict[str, str]) -> int:
        return server.http.get(f"/requests/{name}", headers=headers).status_code

    owned = server.http.post("/v1/completions", json={"prompt": "a"}, headers=ALICE).json()["id"]
    assert [status(owned, headers) for headers in (ALICE, BOB, {})] == [200, 404, 404]
    several = server.http.post("/v1/completions", json={"prompt": "a", "n": 2}, headers=ALICE).json()["id"]
    assert [status(several, headers) for headers in (ALICE, BOB, {})] == [200, 404, 404]
    free = server.post("/v1/completions", {"prompt": "a"}).json()["id"]
    assert [status(free, headers) for headers in (ALICE, BOB, {})] == [200, 200, 200]


def test_cached_tokens_count_once_a_prompt(server, engine):
    engine.num_cached_tokens = 2
    for body, expected in (({"prompt": "a"}, 2), ({"prompt": "a", "n": 3}, 2), ({"prompt": ["a", "b"], "n": 2}, 4)):
        usage = server.post("/v1/completions", body).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": expected}
    usage = server.post("/v1/chat/completions", CHAT).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    stream = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    assert server.events("/v1/completions", stream)[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
