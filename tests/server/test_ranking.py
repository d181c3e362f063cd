"""Tests the limit of the texts that a ranking request copies, before anything is copied."""

from __future__ import annotations

import threading

import pytest

from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.errors import RequestError
from llm_serving.model.pooling import NO_PROMPT, Pooling
from llm_serving.server.limits import INLINE_TOKENIZE_CHARS
from llm_serving.server.pooling import ranking
from support.fake_engine import FakeEngine
from support.http_server import running

LIMIT = 20_000


@pytest.fixture
def scoring(tokenizer, monkeypatch):
    """A server for scores with a maximum body of ``LIMIT`` bytes. It refuses each request when its texts are made."""

    async def stop(state, texts, param):
        raise RequestError(f"{len(texts)} texts")

    monkeypatch.setattr(ranking, "resolve_prompts", stop)
    pooling = Pooling(width=1, normalises=False, score_tokens=(7, 9))
    with running(FakeEngine(tokenizer), max_body_bytes=LIMIT, pooling=pooling) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "body", "arithmetic"),
    [
        ("/v1/rerank", {"query": "q" * 199, "documents": ["d"] * 101},
         "101 x 0 (instruction) + 101 x 199 (query) + 101 (documents) = 20200 characters; the maximum is 20000"),
        ("/v1/rerank", {"query": "q", "documents": ["d"] * 100, "instruction": "i" * 199},
         "100 x 199 (instruction) + 100 x 1 (query) + 100 (documents) = 20100 characters"),
        ("/v1/score", {"text_1": "a" * 200, "text_2": ["b"] * 100},
         "100 x 0 (instruction) + 100 x 200 (text_1) + 100 (text_2) = 20100 characters"),
        ("/v1/score", {"text_1": ["a" * 99] * 100, "text_2": ["b"] * 100, "instruction": "i" * 101},
         "100 x 101 (instruction) + 9900 (text_1) + 100 (text_2) = 20100 characters"),
    ],
)  # fmt: skip
def test_copied_texts_are_bounded_before_they_are_copied(scoring, path, body, arithmetic):
    response = scoring.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "request_too_large")
    assert arithmetic in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"query": "q" * 199, "documents": ["d"] * 100}),
        ("/v1/score", {"text_1": ["a" * 99] * 100, "text_2": ["b"] * 100, "instruction": "i" * 100}),
    ],
)
def test_texts_of_the_maximum_size_are_accepted(scoring, path, body):
    assert scoring.post(path, body).json()["error"]["message"] == "100 texts"


def threads_of(monkeypatch, owner, name):
    """Returns a list to which each call of the function ``name`` of ``owner`` appends its thread."""
    threads, original = [], getattr(owner, name)

    def watched(*args, **named):
        threads.append(threading.current_thread())
        return original(*args, **named)

    monkeypatch.setattr(owner, name, watched)
    return threads


@pytest.mark.parametrize("number", [2, 20])
def test_many_documents_are_cut_in_another_thread(scoring, tokenizer, monkeypatch, number):
    documents = ["a b c " * 100] * number
    encoded = threads_of(monkeypatch, type(tokenizer), "encode")
    decoded = threads_of(monkeypatch, Tokenizer, "decode")
    assert len(documents[0]) * 2 <= INLINE_TOKENIZE_CHARS < len(documents[0]) * 20
    scoring.post("/v1/rerank", {"query": "q", "documents": documents, "max_tokens_per_doc": 50})
    for threads in (encoded, decoded):
        assert [thread is scoring._thread for thread in threads] == [number == 2] * number


def test_only_documents_that_are_cut_are_decoded(scoring, monkeypatch):
    decoded = threads_of(monkeypatch, Tokenizer, "decode")
    scoring.post("/v1/rerank", {"query": "q", "documents": ["a", "a b c " * 20, "b"], "max_tokens_per_doc": 8})
    assert len(decoded) == 1


@pytest.fixture
def joining(tokenizer):
    """A server whose model reads the tokens of both texts of a pair. The maximum of one request is 4000 tokens."""
    pooling = Pooling(width=1, normalises=False, pair_prompt=NO_PROMPT, labels=("a",))
    with running(FakeEngine(tokenizer), pooling=pooling, max_request_tokens=4000) as server:
        yield server


@pytest.mark.parametrize(
    ("query", "documents", "param", "code"),
    [
        ("a b " * 10, ["c"] * 200, "documents", "request_too_large"),
        ("a b " * 20, ["c", "c d " * 20], "documents[1]", "context_length_exceeded"),
    ],
)
def test_pairs_are_checked_before_their_tokens_are_joined(joining, monkeypatch, query, documents, param, code):
    monkeypatch.setattr(ranking, "Prompt", None)
    response = joining.post("/v1/rerank", {"query": query, "documents": documents})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)


@pytest.mark.parametrize("number", [2, 120])
def test_the_tokens_of_many_pairs_are_joined_in_another_thread(joining, monkeypatch, number):
    async def stop(generation, request, prompts, param):
        raise RequestError(f"{len(prompts)} pairs")

    monkeypatch.setattr(ranking, "pooled_results", stop)
    threads = threads_of(monkeypatch, ranking, "Prompt")
    response = joining.post("/v1/rerank", {"query": "a b " * 10, "documents": ["c"] * number})
    assert response.json()["error"]["message"] == f"{number} pairs"
    assert [thread is joining._thread for thread in threads] == [number == 2] * number
