"""Tests the limit of the texts that a ranking request copies, before anything is copied."""

from __future__ import annotations

import pytest

from llm_serving.errors import RequestError
from llm_serving.model.pooling import Pooling
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
