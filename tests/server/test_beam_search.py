"""Tests beam search over HTTP: vLLM's fields, the responses, and parameters that cannot be combined with it."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from llm_serving.engine.beam_search import Beam, BeamSearchParams
from llm_serving.errors import EngineFailedError, QueueFullError
from llm_serving.request import FinishReason, TokenLogits
from llm_serving.server.generation import beams as beams_module
from llm_serving.server.limits import INLINE_ITEMS
from support.fake_engine import FAKE_TIMINGS, MODEL_NAME, beam_logits
from support.http_server import http_request, wait_until
from support.lazy_module import LazyModule

openai = LazyModule("openai")

HELLO = [{"role": "user", "content": "hello"}]


def beam(tokenizer: Any, text: str, *, ended: bool) -> Beam:
    ids = [*tokenizer.encode(text, add_special_tokens=False), *([2] if ended else [])]
    logits = [TokenLogits(token, -0.5, 2.5, ((token, 2.0), (token + 1, 1.0), (token + 2, 0.0))) for token in ids]
    return Beam(tuple(ids), beam_logits(logits), -0.5 * len(ids), FinishReason.STOP if ended else FinishReason.LENGTH)


@pytest.fixture
def beams(engine: Any, tokenizer: Any) -> list[Beam]:
    texts = (("hello to the bird", True), ("the fox", False), ("the bird", True))
    engine.beams = [beam(tokenizer, text, ended=ended) for text, ended in texts]
    return list(engine.beams)


def test_the_best_beams_are_the_choices(server: Any, engine: Any, tokenizer: Any, beams: list[Beam]) -> None:
    body = {"prompt": "Once upon", "use_beam_search": True, "n": 2, "best_of": 3, "max_tokens": 8, "temperature": 0,
            "length_penalty": 0.5, "logprobs": 1, "return_token_ids": True}  # fmt: skip
    answer = server.post("/v1/completions", body).json()
    assert engine.searches == [BeamSearchParams(3, 8, 0.5, frozenset({2}), num_top=1)]
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [
        (0, " hello to the bird", "stop"), (1, " the fox", "length"),
    ]  # fmt: skip
    assert [tuple(choice["token_ids"]) for choice in answer["choices"]] == [one.token_ids for one in beams[:2]]
    assert answer["choices"][1]["logprobs"]["token_logprobs"] == [-0.5] * len(beams[1].token_ids)
    assert [len(tops) for tops in answer["choices"][1]["logprobs"]["top_logprobs"]] == [1] * len(beams[1].token_ids)
    prompt = tokenizer.encode("Once upon")
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == sum(len(one.token_ids) for one in beams[:2])
    [request] = engine.submitted
    assert (request.request_id, request.prompt_token_ids) == (answer["id"], prompt)
    [arrival] = server.log.named("request_arrival")
    assert arrival["request_id"] == answer["id"]


@pytest.mark.parametrize("num_tokens", [INLINE_ITEMS // 2, INLINE_ITEMS])
def test_long_beams_become_text_in_another_thread(
    server: Any, engine: Any, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    threads = []
    answer = beams_module._answer

    def noted(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return answer(*arguments)

    monkeypatch.setattr(beams_module, "_answer", noted)
    entries = [TokenLogits(300, -0.5, 2.5, ((300, 2.0),))] * num_tokens
    engine.beams = [Beam((300,) * num_tokens, beam_logits(entries), -1.0, FinishReason.LENGTH)]
    body = {"prompt": "a", "use_beam_search": True, "logprobs": 1}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == num_tokens
    [thread] = threads
    assert (thread == server._thread.ident) == (2 * num_tokens <= INLINE_ITEMS)


def test_a_search_accepts_several_prompts(server: Any, engine: Any, beams: list[Beam]) -> None:
    engine.num_cached_tokens = 2
    body = {"prompt": ["a", "b"], "use_beam_search": True, "n": 2, "return_receipt": True}
    answer = server.post("/v1/completions", body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    names = [f"{answer['id']}-{number}" for number in range(2)]
    assert [request.request_id for request in engine.submitted] == names
    assert [receipt["request_id"] for receipt in answer["receipt"]["sequences"]] == names
    assert answer["receipt"]["sequences"][0]["e2e_ms"] == FAKE_TIMINGS.e2e * 1000
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_the_official_client_can_search_in_a_chat(server: Any, engine: Any, beams: list[Beam]) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        chat = client.chat.completions.create(
            model=MODEL_NAME, messages=HELLO, n=2, logprobs=True, top_logprobs=2,
            extra_body={"use_beam_search": True, "beam_width": 3, "priority": 4},
        )  # fmt: skip
    assert [choice.message.content for choice in chat.choices] == ["hello to the bird", "the fox"]
    assert [len(token.top_logprobs) for token in chat.choices[1].logprobs.content] == [2] * len(beams[1].token_ids)
    [params], [request] = engine.searches, engine.submitted
    assert (params.width, params.length_penalty) == (3, 1.0)
    assert params.max_tokens == 100 - len(request.prompt_token_ids) + 1, "all there is room for in one prompt"
    assert request.scheduling.priority == 4
    assert len(request.scheduling.tenant) == 16


def test_end_tokens(server: Any, engine: Any, tokenizer: Any, beams: list[Beam]) -> None:
    body = {"prompt": "a", "use_beam_search": True}
    stop = beams[0].token_ids[-2]
    engine.beams = [Beam(beams[0].token_ids[:-1], beam_logits(beams[0].logits[:-1]), -1.0, FinishReason.STOP)]
    whole = server.post("/v1/completions", {**body, "stop_token_ids": [stop], "ignore_eos": True,
                                            "include_stop_str_in_output": True}).json()["choices"][0]  # fmt: skip
    cut = server.post("/v1/completions", {**body, "stop_token_ids": [stop]}).json()["choices"][0]
    assert (whole["text"], whole["stop_reason"]) == (" hello to the bird", stop)
    assert (cut["text"], cut["stop_reason"]) == (" hello to the", stop)
    assert [params.end_token_ids for params in engine.searches] == [{stop}, {stop, 2}]


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"stream": True}, "stream", "'stream' with 'use_beam_search' is not supported"),
        ({"temperature": 0.7}, "temperature", "'temperature' is 0.7; a beam search does not use it."),
        ({"top_p": 0.5}, "top_p", "'top_p' is 0.5; a beam search does not use it."),
        ({"presence_penalty": 1}, "presence_penalty", "'presence_penalty' is 1"),
        ({"stop": "x"}, "stop", "'stop' is ('x',); a beam search does not use it."),
        ({"n": 17}, "n", "A beam search of 17 beams ('n') with n = 17 is not possible"),
        ({"n": 4, "beam_width": 3}, "beam_width", "A beam search of 3 beams ('beam_width') with n = 4 is not possible"),
        ({"best_of": 40}, "best_of", "A beam search of 40 beams ('best_of')"),
        ({"prompt": ["a"] * 20, "n": 1, "best_of": 16}, "best_of", "20 prompts of 16 beams make 320 sequences"),
        ({"n": 16, "stop_token_ids": list(range(3, 20))}, "stop_token_ids", "16 beams and 18 end tokens are 34"),
        ({"max_tokens": 120}, "max_tokens", "after a prompt of 2 needs prompts of up to 121"),
        ({"length_penalty": 9}, "length_penalty", "'length_penalty' should be less than or equal to 8"),
        ({"use_beam_search": False, "length_penalty": 1}, "length_penalty", "only allowed when 'use_beam_search'"),
        ({"use_beam_search": None, "beam_width": 2}, "beam_width", "only allowed when 'use_beam_search' is true"),
        ({"use_beam_search": False, "best_of": 2}, "best_of", "'best_of' is 2 and n is 1"),
    ],
)  # fmt: skip
def test_incompatible_options_are_refused(server: Any, engine: Any, fields: Any, param: str, text: str) -> None:
    response = server.post("/v1/completions", {"prompt": "a", "use_beam_search": True, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert text in error["message"]
    assert engine.searches == []


@pytest.mark.parametrize(("error", "status"), [(QueueFullError("full"), 429), (EngineFailedError("lost"), 500)])
def test_a_search_that_fails(server: Any, engine: Any, error: Exception, status: int) -> None:
    engine.refuse = error
    assert server.post("/v1/completions", {"prompt": "a", "use_beam_search": True}).status_code == status
    assert len(server.log.named("request_refused")) == (status == 429)


def test_a_client_that_leaves_ends_its_search(server: Any, engine: Any, beams: list[Beam]) -> None:
    engine.delay_s = 5
    body = json.dumps({"prompt": "a", "use_beam_search": True}).encode()
    server.raw(http_request("/v1/completions", body)).close()
    wait_until(lambda: bool(engine.submitted) and engine.submitted[0].aborted)
