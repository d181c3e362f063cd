"""Tests log-probabilities of prompts: how the server asks the engine for them, and the forms of the response."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.fake_engine import LOGSUMEXP, FakeEngine
from support.http_server import HttpServer, running

LOGPROB = 2.0 - LOGSUMEXP


def choices(server: HttpServer, **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    response = server.post("/v1/completions", fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"], response.json()["usage"]


def test_a_prompt_without_output_is_scored_by_a_sequence_of_its_tokens(server: HttpServer) -> None:
    [choice], usage = choices(server, prompt=[1, 300, 301, 2, 302], echo=True, logprobs=1, max_tokens=0)
    [scoring] = server.engine.submitted
    assert (scoring.prompt_token_ids, scoring.num_tokens, scoring.finish_reason) == ([1], 4, "length")
    assert (usage["prompt_tokens"], usage["completion_tokens"], choice["finish_reason"]) == (5, 0, "length")
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None, *[LOGPROB] * 4]
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["tokens"]) == 5
    offsets = logprobs["text_offset"]
    assert choice["text"][offsets[2] : offsets[3]] == logprobs["tokens"][2]
    assert (offsets[0], offsets[1], offsets[3]) == (0, 0, offsets[4])


def test_choices_of_several_prompts_share_the_scores_of_their_prompt(server: HttpServer) -> None:
    fields = {"prompt": [[1, 300], [1, 301, 302], [5]], "n": 2, "max_tokens": 2, "prompt_logprobs": 1}
    answers, usage = choices(server, **fields)
    assert [one.prompt_token_ids for one in server.engine.submitted[6:]] == [[1], [1]]
    lists = [answer["prompt_logprobs"] for answer in answers]
    assert [list(map(bool, one)) for one in lists[::2]] == [[False, True], [False, True, True], [False]]
    assert lists[::2] == lists[1::2]
    assert lists[2][2].keys() == {"302"}
    assert (lists[2][2]["302"]["logprob"], lists[2][2]["302"]["rank"]) == (LOGPROB, 1)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 12)
    assert all(answer["logprobs"] is None for answer in answers)


def test_a_token_that_is_none_of_the_best_has_no_rank(server: HttpServer) -> None:
    [choice], _ = choices(server, prompt=[1, 300], max_tokens=0, prompt_logprobs=0)
    assert choice["text"] == ""
    assert choice["prompt_logprobs"][1]["300"]["rank"] is None


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 0}, {"prompt_logprobs": 0}])
def test_a_server_without_masks_refuses(server: HttpServer, fields: dict[str, Any]) -> None:
    with running(FakeEngine(server.engine.tokenizer), structured_outputs=False) as plain:
        response = plain.post("/v1/completions", {"prompt": "a", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(fields))


def test_a_chat_has_the_ids_and_scores_of_its_prompt_next_to_the_choices(server: HttpServer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 2, "return_token_ids": True}
    tokens = server.post("/tokenize", {"messages": body["messages"]}).json()["tokens"]
    answer = server.post("/v1/chat/completions", body | {"prompt_logprobs": 1}).json()
    assert answer["prompt_token_ids"] == tokens
    assert answer["prompt_logprobs"][0] is None
    assert [next(iter(one)) for one in answer["prompt_logprobs"][1:]] == [str(one) for one in tokens[1:]]
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [2, 2]
    lines = server.post("/v1/chat/completions", body | {"stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [tokens] * 2
