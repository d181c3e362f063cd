"""Tests that the server stops within seconds, and that waiting clients get an error."""

import json
import time
from dataclasses import replace

from support.fake_engine import FakeEngine, make_status
from support.http_server import HttpServer, http_request, read_response, wait_until
from support.time_limits import time_limit


def slow_server(tokenizer, drain_s: float = 0.3) -> HttpServer:
    engine = FakeEngine(tokenizer)
    engine.script = lambda prompt, sampling: [300] * 100
    engine.delay_s = 0.05
    server = HttpServer(engine)
    server.drain_s = drain_s
    return server.start()


def test_a_stream_ends_with_an_error_event(tokenizer):
    server = slow_server(tokenizer)
    body = json.dumps({"prompt": "a", "max_tokens": 100, "stream": True}).encode()
    with server.raw(http_request("/v1/completions", body)) as connection:
        wait_until(lambda: bool(server.engine.submitted) and server.engine.submitted[0].num_pieces > 1)
        start = time.monotonic()
        server.request_stop()
        _, _, text = read_response(connection)
    server.join()
    assert time.monotonic() - start < time_limit(2.5)
    events = [line for line in text.decode().split("\n") if line.startswith("data: ")]
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert (error["message"], error["type"], error["code"]) == ("The server is stopping.", "server_error", "stopping")
    assert events[-1] == "data: [DONE]"
    assert server.engine.submitted[0].aborted


def test_a_waiting_client_gets_503(tokenizer):
    server = slow_server(tokenizer)
    with server.raw(http_request("/generate", b'{"inputs": "a"}')) as connection:
        wait_until(lambda: bool(server.engine.submitted))
        server.request_stop()
        status, headers, body = read_response(connection)
    server.join()
    assert (status, headers["retry-after"]) == (503, "1")
    assert json.loads(body)["error"]["code"] == "stopping"


def test_new_requests_get_503_while_running_ones_complete(tokenizer):
    server = slow_server(tokenizer, drain_s=600.0)
    with server.raw(http_request("/generate", b'{"inputs": "a"}')) as connection:
        wait_until(lambda: bool(server.engine.submitted))
        server.request_stop()
        wait_until(lambda: server.http.get("/health/ready").status_code == 503)
        assert server.http.get("/health/ready").json() == {"status": "stopping", "ready": False}
        refused = server.post("/generate", {"inputs": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        assert read_response(connection)[0] == 200
    server.join()


def test_a_stopped_engine_leaves_nothing_to_wait_for(tokenizer):
    server = slow_server(tokenizer, drain_s=600.0)
    with server.raw(http_request("/generate", b'{"inputs": "a"}')) as connection:
        wait_until(lambda: bool(server.engine.submitted))
        server.engine.current = make_status(state="stopped")
        server.request_stop()
        assert read_response(connection)[0] == 503
    server.join()


def test_a_request_that_ends_in_time_is_answered(tokenizer):
    server = slow_server(tokenizer)
    server.engine.say("hello")
    with server.raw(http_request("/generate", b'{"inputs": "a"}')) as connection:
        wait_until(lambda: bool(server.engine.submitted))
        server.request_stop()
        status, _, body = read_response(connection)
    server.join()
    assert (status, json.loads(body)["generated_text"]) == (200, " hello")


def test_idle_connections_do_not_delay_the_shutdown(tokenizer):
    server = HttpServer(FakeEngine(tokenizer)).start()
    assert server.http.get("/health/live").status_code == 200
    with server.raw(b""), server.raw(b"POST /gen"):
        start = time.monotonic()
        server.stop()
        assert time.monotonic() - start < time_limit(2.5)


def test_a_client_that_does_not_read_does_not_delay_the_shutdown_for_long(tokenizer):
    server = HttpServer(FakeEngine(tokenizer)).start()
    server.engine.script = lambda prompt, sampling: [300] * 1_000_000
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 100}).encode()
    server.engine._step = never_ending(server.engine._step)
    server.engine.delay_s = 0.0001
    with server.raw(http_request("/v1/completions", body)):
        wait_until(lambda: bool(server.engine.submitted) and server.engine.submitted[0].num_pieces > 500, timeout_s=10)
        start = time.monotonic()
        server.stop()
        assert time.monotonic() - start < time_limit(3.5)


def never_ending(step):
    """Returns a function that makes pieces of 50 kB, more than the socket buffers hold. No piece is the last one."""
    return lambda *args: replace(step(*args), finish_reason=None, text="x" * 50_000)
