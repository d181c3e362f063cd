"""Tests structured output of a real server.

The text fits its grammar, never depends on the batch, and changes no other request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.server_process import ServerProcess, running_server

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "size": {"type": "integer", "minimum": -5, "maximum": 5},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
CHOICES = ["alpha", "beta", "gamma (3)"]
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
SHORT = ["model_config.max_generate_length=256", "model_config.seq_length=[256]", "pa_config.decode_seq_length=256"]
SERVERS = {
    "two agents": ["parallel_config.tensor_parallel=2"],
    "native, few blocks": [
        *("model_config.op_table=native", "model_config.model_dtype=bfloat16"),
        *SHORT,
        "pa_config.num_blocks=24",
        "scheduler_config.policy=chunked",
        "scheduler_config.prefix_cache=true",
    ],
}


@pytest.fixture(scope="module", params=SERVERS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shallow_model: Path
) -> Iterator[ServerProcess]:
    settings = [f"model_config.model_path={shallow_model}", *SERVERS[request.param]]
    with running_server(tmp_path_factory.mktemp("server"), settings) as server:
        yield server


def requests(count: int) -> list[dict[str, Any]]:
    """Returns random bodies of several kinds: constrained and free, greedy and random, with penalties, biases and
    log-probabilities.
    """
    bodies = []
    for seed in range(count):
        body = {"prompt": [1, 310 + seed, 320], "max_tokens": 120, "seed": seed, "temperature": seed % 3 * 0.7}
        kinds: list[dict[str, Any]] = [
            {"response_format": FORMAT},
            {"structured_outputs": {"regex": "[a-f]{3,9}(-[0-9]+)?"}},
            {"max_tokens": 40, "ignore_eos": True},
            {"structured_outputs": {"choice": CHOICES}, "repetition_penalty": 1.3, "logprobs": 2},
            {"logit_bias": {"330": 20, "331": 19.5}, "frequency_penalty": 0.5, "max_tokens": 40, "ignore_eos": True},
        ]
        bodies.append(body | kinds[seed % 5])
    return bodies


def answer(server: ServerProcess, body: dict[str, Any]) -> tuple[str, str, Any]:
    choice = server.post("/v1/completions", body)["choices"][0]
    return choice["text"], choice["finish_reason"], choice["logprobs"]


def check(body: dict[str, Any], text: str, finish_reason: str) -> None:
    if finish_reason == "length":
        assert body["max_tokens"] in (40, 120)
    elif "response_format" in body:
        thing = json.loads(text)
        assert set(thing) == {"name", "tags", "size"}
        assert len(thing["name"]) <= 12
        assert set(thing["tags"]) <= {"red", "green", "blue"}
        assert -5 <= thing["size"] <= 5
    elif "regex" in body["structured_outputs"]:
        assert re.fullmatch("[a-f]{3,9}(-[0-9]+)?", text)
    else:
        assert text in CHOICES


def test_texts_fit_and_are_the_same_alone_and_together(server: ServerProcess) -> None:
    bodies = requests(15)
    alone = [answer(server, body) for body in bodies]
    for body, (text, finish_reason, _) in zip(bodies, alone, strict=True):
        check(body, text, finish_reason)
    assert sum(finish_reason == "stop" for _, finish_reason, _ in alone) > 4
    with ThreadPoolExecutor(len(bodies)) as pool:
        assert list(pool.map(lambda body: answer(server, body), bodies)) == alone
    server.wait_until_idle()


def test_choices_of_one_request_have_a_constraint_each(server: ServerProcess) -> None:
    body = {"prompt": [1, 330], "n": 4, "temperature": 1, "seed": 3, "max_tokens": 20}
    choices = server.post("/v1/completions", body | {"structured_outputs": {"regex": "[0-9]{4}"}})["choices"]
    texts = [choice["text"] for choice in choices]
    assert all(re.fullmatch("[0-9]{4}", text) for text in texts)
    assert len(set(texts)) > 1


def test_rules_about_tokens_hold_alone_and_together(server: ServerProcess) -> None:
    allowed = [2, *range(300, 312)]
    bodies: list[dict[str, Any]] = []
    for seed in range(12):
        body = {"prompt": [1, 310 + seed], "max_tokens": 40, "seed": seed, "temperature": seed % 2, "logprobs": 1}
        rules = {"allowed_token_ids": allowed, "min_tokens": 30} if seed % 3 else {"max_tokens": 30}
        bodies.append(body | rules | {"return_token_ids": True})

    def choice(body: dict[str, Any]) -> Any:
        return server.post("/v1/completions", body)["choices"][0]

    alone = [choice(body) for body in bodies]
    for body, answer in zip(bodies, alone, strict=True):
        if "min_tokens" in body:
            assert set(answer["token_ids"]) <= set(allowed)
            assert 2 not in answer["token_ids"][:30]
            assert len(answer["token_ids"]) >= 30
    with ThreadPoolExecutor(len(bodies)) as pool:
        assert list(pool.map(choice, bodies)) == alone
    server.wait_until_idle()


def test_a_bias_comes_before_penalties_and_mask_and_changes_no_log_probability(server: ServerProcess) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"logit_bias": {str(one): 100 for one in (330, 331, 332)}},
        {"logit_bias": {"330": 100, "331": 99}, "frequency_penalty": 2, "repetition_penalty": 1.2},
        {"structured_outputs": {"regex": "[a-f]{3,9}(-[0-9]+)?"}, "logit_bias": {"340": 100}},
        {"logit_bias": {str(one): -100 for one in range(3, 200)}, "allowed_token_ids": list(range(150, 205))},
    ]
    bodies = []
    for seed in range(15):
        body = {"prompt": [1, 310 + seed], "max_tokens": 30, "seed": seed, "temperature": seed % 2, "logprobs": 20}
        bodies.append(body | kinds[seed % 5] | {"return_token_ids": True})

    def choice(body: dict[str, Any]) -> Any:
        return server.post("/v1/completions", body)["choices"][0]

    alone = [choice(body) for body in bodies]
    for number, answer in enumerate(alone):
        ids = answer["token_ids"]
        if number % 5 == 1:
            assert set(ids) <= {330, 331, 332}
            free = choice({**bodies[number], "logit_bias": None, "max_tokens": 1})
            tops = [list(each["logprobs"]["top_logprobs"][0].items())[:20] for each in (answer, free)]
            assert tops[0] == tops[1]
        elif number % 5 == 2:
            assert {330, 331} <= set(ids)
        elif number % 5 == 4:
            assert set(ids) <= set(range(200, 205))
    with ThreadPoolExecutor(len(bodies)) as pool:
        assert list(pool.map(choice, bodies)) == alone
    server.wait_until_idle()


def test_beams_follow_a_grammar_and_are_the_most_likely_texts(server: ServerProcess) -> None:
    """The grammar allows one of five letters and then the end. The test scores every text as a prompt, which must give
    the same bits.
    """
    prompt = [1, 310, 311]
    body = {
        "prompt": prompt, "use_beam_search": True, "n": 3, "max_tokens": 8, "logprobs": 0, "return_token_ids": True,
        "structured_outputs": {"regex": "[a-e]"}, "temperature": 0,
    }  # fmt: skip
    found = server.post("/v1/completions", body)["choices"]
    assert [choice["finish_reason"] for choice in found] == ["stop"] * 3
    end = found[0]["token_ids"][-1]
    scores = {}
    for letter in "abcde":
        [token] = server.post("/tokenize", {"prompt": letter, "add_special_tokens": False})["tokens"]
        scored = {"prompt": [*prompt, token, end], "echo": True, "logprobs": 0, "max_tokens": 0}
        scores[letter] = server.post("/v1/completions", scored)["choices"][0]["logprobs"]["token_logprobs"][3:]
    best = sorted(scores, key=lambda letter: -sum(scores[letter]))[:3]
    assert [choice["text"] for choice in found] == best
    assert [choice["logprobs"]["token_logprobs"] for choice in found] == [scores[letter] for letter in best]
    thing = {**body, "n": 2, "max_tokens": 120, "structured_outputs": None, "response_format": FORMAT}
    bodies = [body, thing, {**body, "structured_outputs": {"choice": CHOICES}}]
    alone = [server.post("/v1/completions", one)["choices"] for one in bodies]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda one: server.post("/v1/completions", one)["choices"], bodies * 2)) == alone * 2
    for choice in alone[1]:
        check(thing, choice["text"], choice["finish_reason"])
    assert {choice["text"] for choice in alone[2]} <= set(CHOICES)


def num_steps(server: ServerProcess) -> int:
    """Returns the number of steps that the agents have completed."""
    server.wait_until_idle()
    steps: int = server.get("/server_info")["engine"]["steps"]
    return steps


def test_a_step_scores_several_tokens_of_a_prompt(server: ServerProcess) -> None:
    body = {"prompt": [1, *range(310, 430)], "max_tokens": 0, "echo": True, "logprobs": 1}
    before = num_steps(server)
    scored = server.post("/v1/completions", body)["choices"][0]["logprobs"]
    assert num_steps(server) - before <= 24, "120 tokens, a batch of 8"
    assert len(scored["tokens"]) == 121


def test_log_probabilities_of_a_prompt_are_those_of_decoding(server: ServerProcess) -> None:
    body = {"prompt": [1, 310, 311], "max_tokens": 40, "temperature": 1, "seed": 5, "logprobs": 3, "ignore_eos": True}
    decoded = server.post("/v1/completions", body | {"return_token_ids": True})["choices"][0]
    whole = [*body["prompt"], *decoded["token_ids"]]
    scored = {"prompt": whole, "echo": True, "logprobs": 3, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 2}
    answers = [server.post("/v1/completions", scored | {"max_tokens": most}) for most in (1, 0)]
    logprobs, prompt_only = (answer["choices"][0]["logprobs"] for answer in answers)
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert len(logprobs[name]) == len(whole) + 1
        assert logprobs[name][3:-1] == decoded["logprobs"][name]
        assert logprobs[name][:-1] == prompt_only[name]
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [1, 0]
    entries = answers[1]["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert [entries[at][str(whole[at])]["logprob"] for at in range(1, len(whole))] == logprobs["token_logprobs"][1:-1]
    with ThreadPoolExecutor(8) as pool:
        together = [each[2] for each in pool.map(partial(answer, server), [scored, body, *requests(6)])]
    assert together[:2] == [logprobs, decoded["logprobs"]]
    server.wait_until_idle()


def test_bad_words_do_not_occur(plain: ServerProcess) -> None:
    body = {"prompt": [1, 310], "max_tokens": 60, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    free = plain.post("/v1/completions", body)["choices"][0]["token_ids"]
    words = [plain.post("/detokenize", {"tokens": free[at : at + 2]})["text"] for at in (3, 20)]
    forms = [plain.post("/tokenize", {"prompt": word, "add_special_tokens": False})["tokens"] for word in words]
    tokens = plain.post("/v1/completions", body | {"bad_words": words})["choices"][0]["token_ids"]
    assert tokens != free
    for form in forms:
        assert all(tokens[at : at + len(form)] != form for at in range(60))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, shallow_model: Path) -> Iterator[ServerProcess]:
    settings = ["serving_config.agent_ports=[0]", f"model_config.model_path={shallow_model}"]
    with running_server(tmp_path_factory.mktemp("plain"), settings) as server:
        yield server


def test_a_chat_streams_json(plain: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "A thing?"}], "response_format": FORMAT, "temperature": 0}
    whole = plain.post("/v1/chat/completions", body | {"max_tokens": 150})["choices"][0]
    check(body | {"max_tokens": 120}, whole["message"]["content"], whole["finish_reason"])


def test_a_killed_agent_changes_no_constrained_text(plain: ServerProcess) -> None:
    bodies = [body | {"max_tokens": 250, "temperature": 1} for body in requests(8)]
    expected = [answer(plain, body) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        with plain.arrivals(len(bodies)):  # a request that arrives after the kill gets a 503
            pending = [pool.submit(answer, plain, body) for body in bodies]
        plain.agents()[0].kill()
        assert [each.result() for each in pending] == expected


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "Missing required"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"structured_outputs": {}}, "structured_outputs", "is empty"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "give one of them"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json", "not"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "not supported"),
    ],
    ids=["no schema", "type", "empty", "two", "regex", "keyword", "ignore_eos"],
)  # fmt: skip
def test_wrong_fields_are_refused(plain: ServerProcess, fields: dict[str, Any], param: str, reason: str) -> None:
    answer = plain.post("/v1/completions", {"prompt": "x"} | fields)
    assert (answer["status"], answer["error"]["param"]) == (400, param)
    assert reason in answer["error"]["message"]


@pytest.mark.sweep  # tests/server/test_tools.py tests the same without an agent
def test_structured_output_can_be_turned_off(tmp_path: Any) -> None:
    with running_server(tmp_path, ["serving_config.structured_outputs=false"]) as server:
        answer = server.post("/v1/completions", {"prompt": "x", "response_format": {"type": "json_object"}})
        assert (answer["status"], "turned off" in answer["error"]["message"]) == (400, True)
        assert server.post("/v1/completions", {"prompt": "x", "response_format": {"type": "text"}})["choices"]
