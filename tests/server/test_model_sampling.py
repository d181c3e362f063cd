"""Tests that the model's recommended sampling parameters are the defaults of OpenAI's endpoints only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from llm_serving.engine.tokenizer import Tokenizer
from support.fake_engine import FakeEngine
from support.http_server import HttpServer, running

DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Iterator[HttpServer]:
    with running(FakeEngine(tokenizer), sampling_defaults=DEFAULTS) as server:
        yield server


def sampled(server: HttpServer, path: str, **fields: Any) -> dict[str, Any]:
    response = server.post(path, fields)
    assert response.status_code == 200, response.text
    sampling = server.engine.submitted[-1].sampling
    return {name: getattr(sampling, name) for name in DEFAULTS}


@pytest.mark.parametrize(
    ("path", "prompt"),
    [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})],
)
def test_a_request_that_sets_nothing_has_the_values_of_the_model(
    served: HttpServer, path: str, prompt: dict[str, Any]
) -> None:
    assert sampled(served, path, max_tokens=2, **prompt) == DEFAULTS
    assert sampled(served, path, max_tokens=2, temperature=0, **prompt) == {**DEFAULTS, "temperature": 0.0}
    given = {"temperature": 1.5, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
    assert sampled(served, path, max_tokens=2, **given, **prompt) == {**given, "top_k": 0}


def test_the_published_dialect_stays_greedy(served: HttpServer) -> None:
    neutral = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    assert sampled(served, "/generate", inputs="a", parameters={"max_new_tokens": 2}) == neutral


def test_a_beam_search_ignores_the_sampling_parameters_of_the_model(served: HttpServer) -> None:
    response = served.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "use_beam_search": True, "n": 2})
    assert response.status_code == 200, response.text
