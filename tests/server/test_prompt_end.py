"""Tests ``continue_final_message`` and ``add_generation_prompt``.

The tests check where the prompt ends, and which requests are refused.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from llm_serving.engine.chat_template import ChatTemplate
from support.fake_engine import FakeEngine
from support.http_server import HttpServer, running

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
PATHS = pytest.mark.parametrize("path", [CHAT, TOKENIZE])
USER = {"role": "user", "content": "hello"}
CONTINUE = {"continue_final_message": True}
TRIMS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}\n</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}{# <think> </think> #}"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def prompt_of(server: HttpServer, path: str, messages: list[Any], **more: Any) -> str:
    """Returns the text of the prompt that the server makes of the messages."""
    server.engine.say("and more")
    body = {"messages": messages, **more}
    response = server.post(path, body | ({"max_tokens": 5} if path == CHAT else {}))
    assert response.status_code == 200, response.text
    ids = response.json()["tokens"] if path == TOKENIZE else server.engine.submitted[-1].prompt_token_ids
    return server.engine.tokenizer.decode(ids, skip_special_tokens=False)


def use(server: HttpServer, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(server.engine.tokenizer, "chat_template", ChatTemplate(template, {}))


@PATHS
def test_the_prompt_ends_where_the_fields_say(server: HttpServer, path: str) -> None:
    messages = [USER, answer("The fox")]
    opened = prompt_of(server, path, messages)
    closed = opened.removesuffix("<|assistant|>")
    assert opened != closed
    assert closed.endswith("The fox</s>")
    assert prompt_of(server, path, messages, add_generation_prompt=True) == opened
    assert prompt_of(server, path, messages, add_generation_prompt=None, continue_final_message=False) == opened
    assert prompt_of(server, path, messages, add_generation_prompt=False) == closed
    for more in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": None}):
        assert prompt_of(server, path, messages, **CONTINUE, **more) == closed.removesuffix("</s>")


@PATHS
@pytest.mark.parametrize("text", ["s", "/", "</s>", "The fox. The fox", "<|assistant|>", "hello"])
def test_text_that_the_template_repeats_is_not_cut(server: HttpServer, path: str, text: str) -> None:
    prompt = prompt_of(server, path, [USER, answer(text)], **CONTINUE)
    assert prompt == prompt_of(server, path, [USER, answer(text)], add_generation_prompt=False).removesuffix("</s>")


@PATHS
def test_white_space_at_the_end_is_kept_if_the_template_keeps_it(
    server: HttpServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prompt_of(server, path, [USER, answer("The fox \n")], **CONTINUE).endswith("The fox \n")
    use(server, monkeypatch, TRIMS)
    assert prompt_of(server, path, [USER, answer("The fox \n")], **CONTINUE).endswith("The fox")


def test_the_answer_has_only_the_new_text(server: HttpServer) -> None:
    server.engine.say("lived by the river")
    body = {"messages": [USER, answer("The fox")], **CONTINUE}
    choice = server.post(CHAT, body).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": " lived by the river", "refusal": None}
    lines = server.post(CHAT, body | {"stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == " lived by the river"


@PATHS
@pytest.mark.parametrize(
    ("messages", "fields", "message"),
    [
        ([USER, answer("a")], {"add_generation_prompt": True}, "'add_generation_prompt' are both true"),
        ([answer("a"), USER], {}, "the last message has the role 'user'"),
        ([USER, {"role": "tool", "tool_call_id": "c", "content": "1"}], {}, "the last message has the role 'tool'"),
        ([USER, answer("")], {}, "the last message has no text"),
        ([USER, answer("a") | {"tool_calls": [CALL]}], {}, "the last message has tool calls"),
        ([USER, {"role": "assistant", "tool_calls": [CALL]}], {}, "the last message has tool calls"),
    ],
)
def test_messages_that_cannot_be_continued_are_refused(
    server: HttpServer, path: str, messages: list[Any], fields: dict[str, Any], message: str
) -> None:
    response = server.post(path, {"messages": messages, **CONTINUE, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "continue_final_message", "invalid_value")
    assert message in error["message"]
    assert server.engine.submitted == []


@PATHS
def test_a_template_that_hides_the_message_is_refused(
    server: HttpServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(server, monkeypatch, "{{ messages[0].content }}")
    response = server.post(path, {"messages": [USER, answer("a")], **CONTINUE})
    assert response.status_code == 400
    assert "chat template does not write the text of the last message" in response.json()["error"]["message"]


@PATHS
@pytest.mark.parametrize("field", ["continue_final_message", "add_generation_prompt"])
def test_the_fields_are_booleans(server: HttpServer, path: str, field: str) -> None:
    response = server.post(path, {"messages": [USER], field: "true"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


@PATHS
def test_a_template_in_a_request_is_refused_with_the_reason(server: HttpServer, path: str) -> None:
    error = server.post(path, {"messages": [USER], "chat_template": "{{ 1 }}"}).json()["error"]
    assert (error["param"], error["code"]) == ("chat_template", "unsupported_parameter")
    assert "for security the server runs only the one of the model folder" in error["message"]
    assert server.post(path, {"messages": [USER], "chat_template": None}).status_code == 200


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>I look", " again.", "So 4."),
        ("<think>a</think>b <think>c", " again.", "So 4."),
        ("<think>a</think>Well,", None, " again.</think>So 4."),
        ("Well,", None, " again.</think>So 4."),
    ],
)
def test_reasoning_continues_if_the_message_ends_inside_it(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, text: str, reasoning: str | None, content: str
) -> None:
    use(server, monkeypatch, THINKS)
    engine = FakeEngine(server.engine.tokenizer)
    engine.say("again.</think>So 4.")
    with running(engine) as thinking:
        # The user's marker does not matter, because only the continued message has the model's reasoning.
        messages = [{"role": "user", "content": "<think>"}, answer(text)]
        response = thinking.post(CHAT, {"messages": messages, **CONTINUE})
    message = response.json()["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_a_grammar_covers_only_the_new_text_after_the_reasoning(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A beam search cannot have a grammar and reasoning. So the server accepts it only where the reasoning is over."""
    use(server, monkeypatch, THINKS)
    more = {"use_beam_search": True, "response_format": {"type": "json_object"}, **CONTINUE}
    with running(FakeEngine(server.engine.tokenizer)) as thinking:
        inside, after = (
            thinking.post(CHAT, {"messages": [USER, answer(text)], **more}).status_code
            for text in ("<think>a", "<think>a</think>b")
        )
    assert (inside, after) == (400, 200)
