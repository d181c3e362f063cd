"""Tests that requests give the garbage collector little work, because a collection pauses the server.

A finished request leaves no reference cycles, and the log-probabilities of a running request are few objects.
"""

import asyncio
import gc
import json
from types import SimpleNamespace

import pytest

from llm_serving.engine.logit_columns import LogitColumns
from llm_serving.engine.open_request import PieceStream
from llm_serving.engine.outputs import MERGE_AT
from llm_serving.errors import ContextLengthError
from llm_serving.request import RequestOutput
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.server.generation.logprobs import chat_entries
from llm_serving.server.generation.sequences import _Collector
from llm_serving.server.http.json_pieces import EncodedList
from llm_serving.server.http.sse import _Backlog
from support.fake_engine import fake_logits
from support.fakes import make_limits, make_request
from support.http_server import http_request, wait_until

REQUESTS = 5


def refused_at_the_door(engine, monkeypatch):
    scheduler = Scheduler(make_limits(max_num_seqs=1, max_waiting_requests=0))
    scheduler.add_request(make_request("a"))

    def queue_full(tenant, num_expected):
        full = scheduler.queue_full(tenant, num_expected)
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


def collected(num_tokens):
    """Returns what a response that is not streamed keeps of ``num_tokens`` tokens."""

    async def collect():
        kept = SimpleNamespace(choices=[None], scoring=[], _sequences=[None], note_tokens=lambda index, token_ids: None)
        collector = _Collector(kept, keep_logits=True)
        for _ in range(num_tokens):
            collector.push(0, piece_with_logits())
        return collector.answers

    return asyncio.run(collect())


def backlog(num_tokens):
    """Returns what a stream keeps of ``num_tokens`` tokens while its client does not read."""
    kept = _Backlog()
    for _ in range(num_tokens):
        kept.add(piece_with_logits())
    return kept


def read_late(num_tokens):
    """Returns what a ``PieceStream`` keeps of ``num_tokens`` tokens until its reader takes them."""
    kept = PieceStream()
    for _ in range(num_tokens):
        kept.push(0, piece_with_logits())
    return kept


def piece_with_logits():
    return RequestOutput("a", "x", (300,), (fake_logits(300, 20),), 1, 1)


def num_tracked(root):
    """Returns the number of objects that a garbage collection visits because ``root`` refers to them."""
    found, waiting = {}, [root]
    while waiting:
        one = waiting.pop()
        if gc.is_tracked(one) and not isinstance(one, type) and id(one) not in found:
            found[id(one)] = one
            waiting += gc.get_referents(one)
    return len(found)


@pytest.mark.parametrize("keep", [collected, backlog, read_late])
def test_kept_log_probabilities_are_few_objects(keep):
    """The largest response has a million log-probabilities. If each were an object, collections would pause the server.

    A backlog has one piece for every ``MERGE_AT`` tokens, which adds 9 objects.
    """
    few, many = num_tracked(keep(MERGE_AT)), num_tracked(keep(MERGE_AT**2))
    assert many - few <= 9 * (MERGE_AT - 1)


def test_encoding_log_probabilities_causes_few_collections(tokenizer):
    """A full collection blocks the event loop, although another thread encodes. 744 tokens have 32,000 objects."""
    columns, collections = LogitColumns([fake_logits(30, 20)] * 744), []
    gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
    try:
        EncodedList(chat_entries(tokenizer, columns, 20))
    finally:
        gc.callbacks.pop()
    assert len(collections) < 20
