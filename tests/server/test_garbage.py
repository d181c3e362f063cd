"""Tests that a finished request leaves no reference cycles.

Collecting cycles would pause the server.
"""

import gc
import json

import pytest

from llm_serving.errors import ContextLengthError
from llm_serving.scheduler.scheduler import Scheduler
from support.fakes import make_limits, make_request
from support.http_server import http_request, wait_until

REQUESTS = 5


def refused_at_the_door(engine, monkeypatch):
    scheduler = Scheduler(make_limits(max_num_seqs=1, max_waiting_requests=0))
    scheduler.add_request(make_request("a"))

    def queue_full(tenant):
        full = scheduler.queue_full(tenant)
        # The variable ``full`` keeps a reference to the error until this function returns, as a frame of the engine
        # does.
        assert full is not None
        return full

    monkeypatch.setattr(engine, "queue_full", queue_full)


def refused_by_the_engine(engine, monkeypatch):
    def refuse(*args, **kwargs):
        raise ContextLengthError("too long")

    monkeypatch.setattr(engine, "open", refuse)


def failing(engine, monkeypatch):
    engine.fail_after = 2


def served(engine, monkeypatch):
    pass


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fate", [served, refused_at_the_door, refused_by_the_engine, failing])
def test_a_request_leaves_no_cycles(server, engine, monkeypatch, fate, stream):
    fate(engine, monkeypatch)
    request = http_request("/v1/completions", json.dumps({"prompt": "a", "stream": stream}).encode())
    with server.raw(b"") as connection:

        def ask():
            connection.sendall(request)
            answer = connection.recv(65536)
            while stream and answer.startswith(b"HTTP/1.1 200") and not answer.endswith(b"\r\n0\r\n\r\n"):
                answer += connection.recv(65536)
            wait_until(lambda: engine.num_open == 0)
            engine.submitted.clear()
            engine.opened.clear()
            server.log.events.clear()

        ask()
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(REQUESTS):
                ask()
            gc.collect()
            left = sorted({type(one).__qualname__ for one in gc.garbage}) if len(gc.garbage) >= REQUESTS else []
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert left == []
