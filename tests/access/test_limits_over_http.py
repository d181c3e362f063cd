"""Tests over HTTP what a key limits: quotas, priorities, models and tenants. Also tests the audit log."""

from __future__ import annotations

import contextlib
import json

import pytest

from llm_serving.access.audit import AuditLog
from llm_serving.access.control import AccessControl
from llm_serving.access.key_store import KeyStore
from llm_serving.access.keys import digest_of
from llm_serving.errors import ConfigError, QueueFullError
from support.access_keys import SilentLog, access_for, bearer, secret_of
from support.fake_engine import FakeEngine
from support.http_server import http_request, read_response, running, wait_until

PROMPT = "a secret prompt about a bird"
KEYS = (
    "alice",
    "narrow requests_in_flight=2",
    "slow requests_per_minute=3",
    "small tokens_per_minute=300",
    "few requests_per_minute=2 tokens_per_minute=150",
    "greedy requests_per_minute=2 tokens_per_minute=150",
    "one requests_per_minute=1",
    "urgent priority=-5",
    "late priority=7",
    "elsewhere models=other",
    "here models=fake-llama,other",
)


@pytest.fixture(scope="module")
def shared(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("access")
    with running(FakeEngine(tokenizer), access_for(folder, *KEYS, audit=folder / "audit.log")) as server:
        server.audit = folder / "audit.log"
        yield server


@pytest.fixture
def server(shared):
    """Provides the server with an empty audit log.

    The line of a request may be written after its client has the response. So the fixture waits for the line of a last
    request, which follows the lines of the previous test.
    """
    shared.engine.reset()
    shared.http.patch("/end-of-test", headers=bearer("alice"))
    wait_until(lambda: '"PATCH"' in shared.audit.read_text())
    shared.audit.write_text("")
    return shared


def complete(server, name, **fields):
    return server.http.post("/v1/completions", json={"prompt": PROMPT, **fields}, headers=bearer(name))


def refused(response):
    assert response.status_code == 429, response.text
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert 1 <= int(response.headers["retry-after"]) <= 60
    return error["message"]


def audited(server, number):
    wait_until(lambda: len(server.audit.read_text().splitlines()) >= number)
    return [json.loads(line) for line in server.audit.read_text().splitlines()]


def test_requests_in_flight_are_limited(server):
    server.engine.delay_s = 0.05
    server.engine.script = lambda prompt, sampling: [300] * 1000
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 100}).encode()
    request = http_request("/v1/completions", body, f"Authorization: Bearer {secret_of('narrow')}")
    with server.raw(request), server.raw(request):
        wait_until(lambda: len(server.engine.submitted) == 2)
        assert "has 2 requests in flight; its limit is 2" in refused(complete(server, "narrow"))
        assert server.http.get("/health/live", headers=bearer("narrow")).status_code == 200
        server.engine.delay_s = 0.0
        server.engine.say("hello")
        assert complete(server, "alice").status_code == 200
    wait_until(lambda: complete(server, "narrow").status_code == 200)


def test_requests_per_minute_are_limited(server):
    assert [complete(server, "slow").status_code for _ in range(3)] == [200] * 3
    response = complete(server, "slow")
    assert "has sent its 3 requests per minute" in refused(response)
    assert int(response.headers["retry-after"]) <= 20
    assert len(server.engine.submitted) == 3
    assert complete(server, "alice").status_code == 200


def test_tokens_per_minute_are_reserved_and_settled(server):
    for _ in range(3):  # each request reserves more than a third of the tokens per minute, and then uses only a few
        assert complete(server, "small", max_tokens=100).status_code == 200
    server.engine.delay_s = 0.05
    server.engine.script = lambda prompt, sampling: [300] * 1000
    body = json.dumps({"prompt": PROMPT, "max_tokens": 100, "stream": True}).encode()
    with server.raw(http_request("/v1/completions", body, f"Authorization: Bearer {secret_of('small')}")):
        wait_until(lambda: len(server.engine.submitted) == 4)
        assert "tokens per minute. Try again later" in refused(complete(server, "small", max_tokens=100, n=2))
    wait_until(lambda: server.engine.num_open == 0)
    response = complete(server, "small", max_tokens=100, n=3)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "request_too_large")
    assert "300 output tokens" in response.json()["error"]["message"]


def test_a_request_that_a_full_queue_refuses_does_not_count_for_the_requests_per_minute(server):
    server.engine.full = QueueFullError("full", retry_after_s=1.0)
    assert [complete(server, "few").status_code for _ in range(3)] == [429] * 3
    server.engine.full = None
    assert [complete(server, "few", max_tokens=10).status_code for _ in range(2)] == [200] * 2
    assert "has sent its 2 requests per minute" in refused(complete(server, "few", max_tokens=10))


def test_a_request_beyond_the_tokens_per_minute_counts_for_the_requests_per_minute(server):
    """The server has read and tokenized its body."""
    server.engine.delay_s = 0.05
    server.engine.script = lambda prompt, sampling: [300] * 1000
    body = json.dumps({"prompt": PROMPT, "max_tokens": 100, "stream": True}).encode()
    with server.raw(http_request("/v1/completions", body, f"Authorization: Bearer {secret_of('greedy')}")):
        wait_until(lambda: len(server.engine.submitted) == 1)
        assert "tokens per minute. Try again later" in refused(complete(server, "greedy", max_tokens=100))
        assert "has sent its 2 requests per minute" in refused(complete(server, "greedy", max_tokens=100))
    wait_until(lambda: server.engine.num_open == 0)


def test_retry_after_of_a_quota_per_minute_may_be_a_minute(server):
    assert complete(server, "one").status_code == 200
    response = complete(server, "one")
    assert "has sent its 1 requests per minute" in refused(response)
    assert 30 < int(response.headers["retry-after"]) <= 60


def test_a_beam_search_reserves_all_its_beams(server):
    response = complete(server, "small", use_beam_search=True, n=4, max_tokens=80)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "request_too_large")
    assert "320 output tokens" in response.json()["error"]["message"]
    assert server.engine.searches == []


def test_priorities_have_a_ceiling(server):
    assert complete(server, "alice", priority=-1).status_code == 403
    assert complete(server, "urgent", priority=-6).json()["error"]["param"] == "priority"
    for name, stated, effective in (
        ("alice", 0, 0), ("alice", 3, 3), ("urgent", -5, -5), ("urgent", None, 0), ("late", None, 7), ("late", 9, 9),
    ):  # fmt: skip
        assert complete(server, name, **({} if stated is None else {"priority": stated})).status_code == 200
        assert server.engine.submitted[-1].scheduling.priority == effective
    response = server.http.post("/generate", json={"inputs": "a"}, headers={**bearer("late"), "X-Priority": "6"})
    assert response.status_code == 403


def test_a_key_may_use_only_its_models(server):
    assert complete(server, "here").status_code == 200
    response = complete(server, "elsewhere")
    assert (response.status_code, response.json()["error"]["param"]) == (403, "model")
    body = {"query": "a", "history": []}
    assert server.http.post("/chat", json=body, headers=bearer("elsewhere")).status_code == 403
    listed = [server.http.get("/v1/models", headers=bearer(name)).json()["data"] for name in ("here", "elsewhere")]
    assert [len(models) for models in listed] == [1, 0]


@pytest.mark.parametrize("path", ["/v1/models/{}", "/v2/models/{}", "/v2/models/{}/ready"])
def test_a_key_learns_nothing_about_other_models(server, path):
    """A key with the right ``models`` gets the same answer for a model that exists and for a name that does not."""

    def get(key, model):
        response = server.http.get(path.format(model), headers=bearer(key))
        return response.status_code, response.text.replace(model, "NAME")

    assert get("here", "fake-llama")[0] == get("alice", "fake-llama")[0] == 200
    assert get("elsewhere", "fake-llama") == get("elsewhere", "unknown")
    assert get("elsewhere", "fake-llama")[0] == 403
    assert "fake-llama" in get("alice", "unknown")[1]
    status, text = get("elsewhere", "other")
    assert status == 404
    assert "serves no model to this key" in text
    assert "fake-llama" not in text


def test_the_error_for_an_unknown_model_names_only_the_models_of_the_key(server):
    here, elsewhere = (complete(server, key, model="other") for key in ("here", "elsewhere"))
    assert here.status_code == elsewhere.status_code == 404
    assert "fake-llama" in here.json()["error"]["message"]
    assert "fake-llama" not in elsewhere.json()["error"]["message"]


def test_the_name_of_the_key_is_the_tenant(server):
    complete(server, "alice")
    complete(server, "here")
    assert [one.scheduling.tenant for one in server.engine.submitted] == ["alice", "here"]
    request_id = server.engine.submitted[0].request_id
    assert server.http.get(f"/requests/{request_id}", headers=bearer("alice")).status_code == 200
    assert server.http.get(f"/requests/{request_id}", headers=bearer("here")).status_code == 404


def test_keys_do_not_share_the_prefix_cache(server):
    """Checks E9 of docs/reliability.md: requests of two keys have different cache salts, even if they state the same
    salt.
    """
    for name in ("alice", "alice", "here"):
        complete(server, name)
        complete(server, name, cache_salt="x")
    salts = [one.scheduling.cache_salt for one in server.engine.submitted]
    assert salts[:2] == salts[2:4]
    assert len(set(salts)) == 4
    assert b"" not in salts


def test_keys_of_one_name_share_tenant_cache_and_quota(tokenizer, tmp_path):
    line = "alice sha256:{} requests_per_minute=2"
    lines = ";".join(line.format(digest_of(secret_of(each)).hex()) for each in ("old", "new"))
    access = AccessControl(KeyStore(None, lines, SilentLog()), None, lambda reason: None)
    with running(FakeEngine(tokenizer), access) as server:
        assert [complete(server, each).status_code for each in ("old", "new", "old", "new")] == [200, 200, 429, 429]
        assert {one.scheduling.tenant for one in server.engine.submitted} == {"alice"}
        assert len({one.scheduling.cache_salt for one in server.engine.submitted}) == 1


@pytest.mark.parametrize(("setting", "number"), [("none", 1), ("tenant", 2), ("auto", 2)])
def test_the_prefix_cache_can_be_shared(tokenizer, tmp_path, setting, number):
    access = access_for(tmp_path, "alice", "bob")
    with running(FakeEngine(tokenizer), access, cache_salt=setting) as server:
        for name in ("alice", "bob"):
            complete(server, name)
        assert len({one.scheduling.cache_salt for one in server.engine.submitted}) == number


def test_a_full_queue_states_the_measured_pause_up_to_30_seconds(server):
    for measured, stated in ((4.2, "5"), (29.01, "30"), (600.0, "30"), (0.1, "1")):
        server.engine.full = QueueFullError("full", retry_after_s=measured)
        response = complete(server, "alice")
        assert (response.status_code, response.headers["retry-after"]) == (429, stated)


def test_the_audit_log_has_no_prompt_and_no_secret(server):
    complete(server, "alice")
    complete(server, "small", max_tokens=100, n=3)
    server.http.get("/v1/models?prompt=secret", headers={"Authorization": "Bearer sk-a-secret"})
    server.http.get("/a/secret/path", headers=bearer("alice"))
    server.http.get("/health/live")
    lines = audited(server, 4)
    assert [(line["key"], line["method"], line["route"], line["status"]) for line in lines] == [
        ("alice", "POST", "/v1/completions", 200),
        ("small", "POST", "/v1/completions", 400),
        ("", "GET", "unmatched", 401),
        ("alice", "GET", "unmatched", 404),
    ]
    prompt = len(server.engine.submitted[0].prompt_token_ids)
    assert (lines[0]["prompt_tokens"], lines[0]["output_tokens"], lines[0]["client"]) == (prompt, 6, "127.0.0.1")
    assert (lines[1]["prompt_tokens"], lines[1]["output_tokens"]) == (0, 0)
    assert all(line["duration_ms"] >= 0 for line in lines)
    text = server.audit.read_text()
    assert "secret" not in text
    assert "bird" not in text
    assert server.audit.stat().st_mode & 0o777 == 0o600


def test_the_audit_log_counts_the_tokens_of_an_aborted_stream(server):
    server.engine.delay_s = 0.01
    server.engine.script = lambda prompt, sampling: [300] * 1000
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 100}).encode()
    with server.raw(http_request("/v1/completions", body, f"Authorization: Bearer {secret_of('alice')}")):
        wait_until(lambda: bool(server.engine.submitted) and server.engine.submitted[0].num_tokens >= 3)
    [line] = audited(server, 1)
    assert (line["key"], line["status"]) == ("alice", 499)
    assert 3 <= line["output_tokens"] < 100
    assert line["output_tokens"] == server.engine.submitted[0].num_tokens


def test_strangers_cannot_fill_the_audit_log(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("llm_serving.access.audit.STRANGERS_PER_MINUTE", 5)
    access = access_for(tmp_path, "alice", audit=tmp_path / "audit.log")
    with running(FakeEngine(tokenizer), access) as server:
        for _ in range(20):
            assert server.http.get("/v1/models").status_code == 401
        assert complete(server, "alice").status_code == 200
    lines = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    refusals = [line for line in lines if line["status"] == 401]
    # The log has 5 refusals immediately, and one more for each 12 seconds that the test takes.
    assert 5 <= len(refusals) < 10
    assert len(refusals) + sum(line["skipped"] for line in lines) == 20
    assert lines[-1]["status"] == 200


@pytest.mark.parametrize("mode", [0o644, 0o660])
def test_an_old_audit_log_becomes_private(tmp_path, mode):
    path = tmp_path / "audit.log"
    path.write_text("earlier\n")
    path.chmod(mode)
    AuditLog(str(path)).close()
    assert (path.stat().st_mode & 0o777, path.read_text()) == (0o600, "earlier\n")


def test_an_audit_log_that_cannot_be_written_stops_the_start(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path, tmp_path / "link"):
        with pytest.raises(ConfigError, match=r"serving_config\.audit_log: cannot open"):
            AuditLog(str(path))
    assert not (tmp_path / "elsewhere").exists()


def test_an_audit_log_without_keys_lets_everybody_in(tokenizer, tmp_path):
    access = access_for(tmp_path, audit=tmp_path / "audit.log")
    with running(FakeEngine(tokenizer), access) as server:
        assert server.http.get("/metrics").status_code == 200
        assert server.http.post("/generate", json={"inputs": "a", "priority": -3}).status_code == 200
        assert server.engine.submitted[0].scheduling.cache_salt == b""
    lines = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    assert [(line["key"], line["route"]) for line in lines] == [("", "/metrics"), ("", "/generate")]


def test_a_request_that_ends_early_gives_its_place_back(server):
    """A request that ends early frees its place for another request of its key.

    A request ends early if its body is wrong or never arrives, or if its client disconnects.
    """
    wrong = http_request("/v1/completions", b"{", f"Authorization: Bearer {secret_of('narrow')}")
    for _ in range(5):
        with server.raw(wrong) as connection:
            assert read_response(connection)[0] == 400
    partial = http_request(
        "/v1/completions", b"{", f"Authorization: Bearer {secret_of('narrow')}", "Content-Length: 99"
    )
    for _ in range(5):
        with contextlib.suppress(OSError), server.raw(partial):
            pass
    wait_until(lambda: complete(server, "narrow").status_code == 200)


def test_each_request_checks_the_queue_limit_of_its_key(server):
    server.engine.asked_for.clear()
    bodies = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": {"messages": []}, "/generate": {"inputs": 1},
              "/chat": {"query": 1}}  # fmt: skip
    for path, body in bodies.items():
        server.http.post(path, json=body, headers=bearer("alice"))
    assert server.engine.asked_for == ["alice"] * 8, "when the headers have arrived, and by the handler"
