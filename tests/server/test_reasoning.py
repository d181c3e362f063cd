"""Tests the reasoning of models: its field in the answer, its tokens in the usage, its effort and its budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from llm_serving.engine.chat_template import ChatTemplate
from llm_serving.engine.tokenizer import Tokenizer
from support.fake_engine import FakeEngine
from support.http_server import HttpServer, running

URL = "/v1/chat/completions"
ASK: list[Any] = [{"role": "user", "content": "Why?"}]
HEAD = (
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }} {{ m.content }}{% endfor %}{{ reasoning_effort }}"
)
CLOSED = HEAD + "<|assistant|>{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>{% endif %}"
OPEN = HEAD + "</think> <|assistant|><think>\n"
END = 2


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[HttpServer]:
    with running(FakeEngine(tokenizer), max_context=4096, max_prompt_tokens=4000) as server:
        yield server


@pytest.fixture(params=[CLOSED, OPEN], ids=["the model begins", "the prompt begins"])
def server(shared: HttpServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HttpServer:
    shared.engine.reset()
    monkeypatch.setattr(shared.engine.tokenizer, "chat_template", ChatTemplate(request.param, {}))
    return shared


def is_open(server: HttpServer) -> bool:
    return server.engine.tokenizer.chat_template.source == OPEN


def reason(server: HttpServer, text: str) -> list[int]:
    """Lets the model reason, and then say the text after the marker. Returns its tokens."""
    _, *tokens = server.engine.tokenizer.encode(f"\n{text}" if is_open(server) else f"<think>\n{text}", False)
    server.engine.script = lambda prompt, sampling: [*tokens, END]
    return tokens


def ask(server: HttpServer, **more: Any) -> dict[str, Any]:
    response = server.post(URL, {"messages": ASK} | more)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def streamed(server: HttpServer, **more: Any) -> tuple[str, str, dict[str, Any]]:
    """Returns reasoning, content and usage of a streamed answer."""
    body = {"messages": ASK, "stream": True, "stream_options": {"include_usage": True}} | more
    lines = server.post(URL, body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
    return thoughts, "".join(delta.get("content", "") for delta in deltas), chunks[-1]["usage"]


def test_reasoning_has_its_own_field(server: HttpServer) -> None:
    reason(server, "I look.\n\nOr not.\n</think>\n\nBecause.")
    answer = ask(server)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("I look.\n\nOr not.", "Because.")
    assert answer["choices"][0]["finish_reason"] == "stop"
    thoughts, content, usage = streamed(server)
    assert (thoughts, content) == ("I look.\n\nOr not.", "Because.")
    assert usage["completion_tokens_details"] == answer["usage"]["completion_tokens_details"]


@pytest.mark.parametrize("pieces", [1, 5, 100])
def test_the_usage_counts_reasoning_tokens(server: HttpServer, pieces: int) -> None:
    tokens = reason(server, "abc def</think>xy")
    server.engine.tokens_per_piece = pieces
    tokenizer = server.engine.tokenizer
    after = len(tokenizer.encode("</think>xy", False)) - len(tokenizer.encode("</think>", False))
    before = 0 if is_open(server) else len(tokenizer.encode("<think>", False)) - 1
    expected = len(tokens) - after - before
    assert ask(server)["usage"]["completion_tokens_details"]["reasoning_tokens"] == expected
    assert streamed(server)[2]["completion_tokens_details"]["reasoning_tokens"] == expected


def test_an_answer_that_ends_within_the_reasoning(server: HttpServer) -> None:
    reason(server, "abc")
    message = ask(server)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("abc", "")


def test_the_effort_is_a_variable_of_the_template(server: HttpServer) -> None:
    server.engine.say("x")
    for effort in ("high", "none"):
        ask(server, reasoning_effort=effort)
        prompt = server.engine.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids, False)
        assert f"Why?{effort}" in prompt
        if not is_open(server):
            assert prompt.endswith("</think>") is (effort == "none")
    ask(server, reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"})
    assert "Why?low" in server.engine.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids, False)


def test_a_budget_ends_the_reasoning(server: HttpServer) -> None:
    for budget in (0, 1, 4, 7):
        reason(server, "a b c d e f g h i j k l m n o p q r s t u v w x y z")
        answer = ask(server, thinking_token_budget=budget, return_token_ids=True)
        text = server.engine.tokenizer.decode(answer["choices"][0]["token_ids"])
        assert text.count("</think>") == 1
        used = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        marker = len(server.engine.tokenizer.encode("</think>", False)) - 1
        assert used == budget + marker
        assert answer["choices"][0]["message"]["content"].endswith("x y z")


def test_a_budget_waits_for_the_end_of_a_character(server: HttpServer) -> None:
    for budget in range(6):
        reason(server, "\U0001f642\U0001f642 and so on, on and on, and on and on, and so on")
        message = ask(server, thinking_token_budget=budget)["choices"][0]["message"]
        assert "\ufffd" not in (message["reasoning_content"] or "") + message["content"]


def test_a_budget_that_is_not_used_up_changes_nothing(server: HttpServer) -> None:
    reason(server, "abc</think>xyz")
    assert ask(server, thinking_token_budget=100)["choices"] == ask(server)["choices"]


def test_structured_output_begins_after_the_reasoning(server: HttpServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for more in ({"response_format": form}, {"structured_outputs": {"regex": r"\{.*\}"}}):
        reason(server, 'Hm, {"b"\n</think>\n\n{"a": 12}')
        message = ask(server, **more)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ('Hm, {"b"', '{"a": 12}')
        reason(server, 'xyz{"a": 12}')
        message = ask(server, thinking_token_budget=4, **more)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("xyz", '{"a": 12}')


def test_a_call_after_the_reasoning(server: HttpServer) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "now"}}]
    for choice in ("auto", "required"):
        reason(server, f"Hm, <tool_call>?\n</think>\n\n{call}")
        answer = ask(server, tools=tools, tool_choice=choice)["choices"][0]
        assert (answer["message"]["reasoning_content"], answer["message"]["content"]) == ("Hm, <tool_call>?", None)
        assert [one["function"] for one in answer["message"]["tool_calls"]] == [{"name": "now", "arguments": "{}"}]
        assert answer["finish_reason"] == "tool_calls"


def test_earlier_reasoning_reaches_the_template(server: HttpServer) -> None:
    server.engine.say("x")
    earlier = {"role": "assistant", "content": "b", "reasoning_content": "thoughts"}
    ask(server, messages=[*ASK, earlier, *ASK])
    prompt = server.engine.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids, False)
    assert "assistant: thoughts b" in prompt


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"response_format": {"type": "json_object"}}, "this model reasons before its answer"),
        ({"thinking_token_budget": 5}, "a budget cannot count the reasoning of beams"),
    ],
)
def test_beams_are_refused_with_the_reason(server: HttpServer, fields: dict[str, Any], reason: str) -> None:
    response = server.post(URL, {"messages": ASK, "use_beam_search": True, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "use_beam_search")
    assert f"'use_beam_search' with '{next(iter(fields))}' is not supported: " in error["message"]
    assert reason in error["message"]
    assert "Leave out" in error["message"]


def test_beams_may_be_constrained_if_reasoning_is_off(shared: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    shared.engine.reset()
    monkeypatch.setattr(shared.engine.tokenizer, "chat_template", ChatTemplate(CLOSED, {}))
    form = {"response_format": {"type": "json_object"}, "reasoning_effort": "none"}
    response = shared.post(URL, {"messages": ASK, "use_beam_search": True, **form})
    assert response.status_code == 200, response.text
    assert len(shared.engine.searches) == 1


@pytest.mark.parametrize("budget", [-1, 1.5, "5", True])
def test_wrong_budgets_are_refused(server: HttpServer, budget: Any) -> None:
    response = server.post(URL, {"messages": ASK, "thinking_token_budget": budget})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "thinking_token_budget")


def test_reasoning_can_stay_in_the_content(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", ChatTemplate(CLOSED, {}))
    engine = FakeEngine(tokenizer)
    engine.say("<think>a</think>b")
    with running(engine, reasoning_format="none") as server:
        message = ask(server)["choices"][0]["message"]
        assert (message["content"], "reasoning_content" in message) == ("<think>a</think>b", False)
