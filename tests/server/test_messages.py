"""Tests Anthropic's API with Anthropic's own client: answers, streams, tools, reasoning, counts and refused requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm_serving.engine.chat_template import ChatTemplate
from llm_serving.engine.tokenizer import Tokenizer
from support.access_keys import access_for, secret_of
from support.fake_engine import MODEL_NAME, FakeEngine
from support.http_server import HttpServer, running
from support.lazy_module import LazyModule
from support.time_limits import time_limit

anthropic = LazyModule("anthropic")

ASK: list[Any] = [{"role": "user", "content": "Weather?"}]
TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "Returns the weather.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}<|assistant|>"
)
THINKING = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>{% endif %}"
END = 2


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[HttpServer]:
    with running(FakeEngine(tokenizer), max_context=4096, max_prompt_tokens=4000, max_body_bytes=1 << 20) as server:
        yield server


@pytest.fixture
def server(shared: HttpServer, monkeypatch: pytest.MonkeyPatch) -> HttpServer:
    shared.engine.reset()
    shared.engine.max_model_len = 4096
    set_template(shared, TEMPLATE, monkeypatch)
    return shared


def set_template(server: HttpServer, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.engine.tokenizer, "chat_template", ChatTemplate(source, {}))


@pytest.fixture
def client(server: HttpServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=time_limit(10)) as client:
        yield client


def body_of(**more: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "max_tokens": 500, "messages": ASK} | more


def ask(client: anthropic.Anthropic, **more: Any) -> Any:
    return client.messages.create(**body_of(**more))


def stream(client: anthropic.Anthropic, **more: Any) -> tuple[list[Any], Any]:
    """Returns the events of a stream, which the client has parsed, and the message that the client has collected."""
    with client.messages.stream(**body_of(**more)) as events:
        return list(events), events.get_final_message()


def without_ids(message: Any) -> list[dict[str, Any]]:
    blocks = [block.model_dump() for block in message.content]
    return [{name: value for name, value in block.items() if name not in ("id", "parsed_output")} for block in blocks]


def say_exactly(engine: FakeEngine, text: str) -> None:
    """Lets every request return ``text`` without the space that the tokenizer adds at the start."""
    _, *tokens = engine.tokenizer.encode(text, add_special_tokens=False)
    engine.script = lambda prompt, sampling: [*tokens, END]


def prompt_of(server: HttpServer) -> str:
    return server.engine.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids, skip_special_tokens=False)


def test_an_answer(client: anthropic.Anthropic, server: HttpServer) -> None:
    server.engine.say("It rains.")
    server.engine.num_cached_tokens = 3
    message = ask(client, system="Be short.", extra_body={"temperature": 0.5, "top_k": 3, "top_p": 0.9})
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL_NAME)
    assert message.id.startswith("msg-")
    assert without_ids(message) == [{"type": "text", "text": "It rains.", "citations": None}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    submitted = server.engine.submitted[-1]
    assert message.usage.input_tokens == len(submitted.prompt_token_ids) - 3
    assert message.usage.cache_read_input_tokens == 3
    assert message.usage.output_tokens == submitted.num_tokens
    assert "<system>Be short.<user>Weather?<|assistant|>" in prompt_of(server)
    sampling = submitted.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.5, 3, 0.9, 500)


def test_the_answer_is_that_of_a_chat(client: anthropic.Anthropic, server: HttpServer) -> None:
    chat = [{"role": "system", "content": "Be short."}, *ASK]
    body = {"messages": chat, "max_tokens": 7, "temperature": 0.0}
    answer = server.post("/v1/chat/completions", body).json()
    message = ask(client, system="Be short.", max_tokens=7, extra_body={"temperature": 0.0})
    first, second = server.engine.submitted
    assert first.prompt_token_ids == second.prompt_token_ids
    assert message.content[0].text == answer["choices"][0]["message"]["content"]
    assert message.usage.output_tokens == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("pieces", [1, 3, 100])
def test_a_stream_equals_the_whole(client: anthropic.Anthropic, server: HttpServer, pieces: int) -> None:
    server.engine.tokens_per_piece, server.engine.num_cached_tokens = pieces, 2
    server.engine.say(f"I look.\n{CALL}")
    whole = ask(client, tools=TOOLS)
    events, message = stream(client, tools=TOOLS)
    assert without_ids(message) == without_ids(whole)
    assert (message.stop_reason, message.usage) == (whole.stop_reason, whole.usage)
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


def test_the_events_of_a_stream(server: HttpServer) -> None:
    server.engine.say("a")
    text = server.post("/v1/messages", body_of(stream=True)).text
    events = [block.split("\n") for block in text.strip().split("\n\n")]
    assert all(len(lines) == 2 for lines in events)
    names = [lines[0].removeprefix("event: ") for lines in events]
    data = [json.loads(lines[1].removeprefix("data: ")) for lines in events]
    assert names == [each["type"] for each in data]
    assert names == ["message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop",
                     "message_delta", "message_stop"]  # fmt: skip
    assert data[0]["message"]["content"] == []
    assert data[3] == {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}
    assert data[5]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_a_tool_call_and_its_result(client: anthropic.Anthropic, server: HttpServer) -> None:
    server.engine.say(f"I look.\n{CALL}")
    message = ask(client, tools=TOOLS)
    text, call = message.content
    assert (text.text, call.name, call.input) == ("I look.", "weather", {"city": "Bern"})
    assert call.id.startswith("toolu_")
    assert message.stop_reason == "tool_use"
    assert '"name": "weather"' in prompt_of(server)
    say_exactly(server.engine, "Rain.")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    history = [*ASK, {"role": "assistant", "content": message.content}]
    history += [{"role": "user", "content": [result, {"type": "text", "text": "So?"}]}]
    assert ask(client, tools=TOOLS, messages=history).content[0].text == "Rain."
    assert '<assistant>I look.<tool_call>weather {"city": "Bern"}<tool>rain<user>So?' in prompt_of(server)


def test_parallel_calls(client: anthropic.Anthropic, server: HttpServer) -> None:
    two = f'{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
    say_exactly(server.engine, two)
    whole = ask(client, tools=TOOLS)
    assert [(call.name, call.input) for call in whole.content] == [("weather", {"city": "Bern"}), ("now", {})]
    assert len({call.id for call in whole.content}) == 2
    assert without_ids(stream(client, tools=TOOLS)[1]) == without_ids(whole)


def test_the_choice_of_tools(client: anthropic.Anthropic, server: HttpServer) -> None:
    say_exactly(server.engine, CALL)
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}, {"type": "auto"}):
        message = ask(client, tools=TOOLS, tool_choice={**choice, "disable_parallel_tool_use": True})
        assert [call.name for call in message.content] == ["weather"]
        assert server.engine.submitted[-1].constraint is not None or choice["type"] == "auto"
    message = ask(client, tools=TOOLS, tool_choice={"type": "none"})
    assert [block.type for block in message.content] == ["text"]
    assert "weather" not in prompt_of(server)


@pytest.mark.parametrize("pieces", [1, 4, 100])
def test_reasoning_is_a_thinking_block(
    client: anthropic.Anthropic, server: HttpServer, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    set_template(server, THINKING, monkeypatch)
    server.engine.tokens_per_piece = pieces
    say_exactly(server.engine, "<think>\nHm.\n</think>\n\nRain.")
    message = ask(client)
    thought, text = message.content
    assert (thought.type, thought.thinking, thought.signature, text.text) == ("thinking", "Hm.", "", "Rain.")
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    events, collected = stream(client)
    assert without_ids(collected) == without_ids(message)
    assert "".join(event.thinking for event in events if event.type == "thinking") == "Hm."
    ask(client, messages=[*ASK, {"role": "assistant", "content": message.content}, *ASK])
    assert "<assistant>Rain.(Hm.)<user>Weather?" in prompt_of(server)


def test_thinking_is_controlled(
    client: anthropic.Anthropic, server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_template(server, THINKING, monkeypatch)
    say_exactly(server.engine, "Rain.")
    ask(client, thinking={"type": "disabled"})
    assert prompt_of(server).endswith("</think>")
    ask(client, thinking={"type": "adaptive"})
    assert prompt_of(server).endswith("<|assistant|>")
    say_exactly(server.engine, "<think>\na b c d e f g h i j k l m n o p q r s t u v w x y z")
    message = ask(client, thinking={"type": "enabled", "budget_tokens": 4})
    assert message.content[1].text.endswith("y z")


def test_a_receipt(server: HttpServer) -> None:
    for path, body in (("/v1/messages", body_of()), ("/v1/responses", {"input": "Weather?"})):
        answer = server.post(path, body | {"return_receipt": True}).json()
        assert answer["receipt"]["id"] == answer["id"]
        assert len(answer["receipt"]["sequences"]) == 1


def test_stop_sequences_and_max_tokens(client: anthropic.Anthropic, server: HttpServer) -> None:
    server.engine.say("hello to the bird")
    message = ask(client, stop_sequences=["the", "zzz"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "the")
    assert stream(client, stop_sequences=["the"])[1].stop_sequence == "the"
    assert ask(client, max_tokens=2).stop_reason == "max_tokens"
    assert stream(client, max_tokens=2)[1].stop_reason == "max_tokens"


def test_an_answer_ends_when_the_context_is_full(client: anthropic.Anthropic, server: HttpServer) -> None:
    """Claude Code asks for 32,000 tokens, whatever the context of the model."""
    server.engine.script = lambda prompt, sampling: [*[5] * 5000, END]
    rest = 4096 - client.messages.count_tokens(model=MODEL_NAME, messages=ASK).input_tokens
    for message in (ask(client, max_tokens=32_000), stream(client, max_tokens=32_000)[1]):
        assert (message.stop_reason, message.usage.output_tokens) == ("model_context_window_exceeded", rest)
    assert ask(client, max_tokens=rest).stop_reason == "max_tokens"
    assert ask(client, max_tokens=rest + 1).stop_reason == "model_context_window_exceeded"
    server.engine.say("It rains.")
    assert ask(client, max_tokens=2**31 - 1).stop_reason == "end_turn"


def test_an_effort_has_no_effect_without_reasoning(client: anthropic.Anthropic, server: HttpServer) -> None:
    """Claude Code sends an effort with every request."""
    effort: Any = {"effort": "high"}
    assert ask(client, output_config=effort).stop_reason == "end_turn"
    assert "high" not in prompt_of(server)


@pytest.mark.parametrize("length", range(8, 26, 3))
def test_a_call_that_is_cut(client: anthropic.Anthropic, server: HttpServer, length: int) -> None:
    say_exactly(server.engine, CALL)
    whole = ask(client, tools=TOOLS, max_tokens=length)
    assert whole.stop_reason == "max_tokens"
    assert without_ids(stream(client, tools=TOOLS, max_tokens=length)[1]) == without_ids(whole)


def test_a_schema_of_the_text(client: anthropic.Anthropic, server: HttpServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    say_exactly(server.engine, '{"a": 12}')
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    assert json.loads(ask(client, output_config=form).content[0].text) == {"a": 12}
    assert server.engine.submitted[-1].constraint is not None


def test_the_number_of_tokens(client: anthropic.Anthropic, server: HttpServer) -> None:
    more: dict[str, Any] = {"system": [{"type": "text", "text": "Be short."}], "tools": TOOLS, "messages": ASK}
    counted = client.messages.count_tokens(model=MODEL_NAME, **more)
    assert server.engine.submitted == []
    usage = ask(client, **more).usage
    assert counted.input_tokens == usage.input_tokens == len(server.engine.submitted[-1].prompt_token_ids)


def test_neighbouring_messages_are_joined(client: anthropic.Anthropic, server: HttpServer) -> None:
    say = [*ASK, {"role": "user", "content": "Now?"}, {"role": "assistant", "content": "a"}]
    ask(client, messages=[*say, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}])
    assert "<user>Weather?\nNow?<assistant>ab<user>c<|assistant|>" in prompt_of(server)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", "max_tokens"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"temperature": 3.0}, "temperature", "less than or equal to 2"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences", "at most 16"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [*ASK, {"role": "assistant", "content": "It"}]}, "messages", "End with a message"),
    ({"messages": [{"role": "user", "content": [{"type": "video", "source": {}}]}]}, "messages[0].content", "video"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "data:"}}]}]},
     "messages[0].content[0]", "this model reads only text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
     "messages[0].content[0]", "tool_use"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text", "5"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "custom"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "weather"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name", "pattern"),
    ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema", "object"),
    ({"tools": [TOOLS[0], {"name": "a", "input_schema": {"properties": {"a": {"not": {}}}}}]},
     "tools[1].input_schema", "'tools[1].input_schema' cannot be used: Unimplemented keys: [\"not\"]"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "tools"),
    ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice.name", "required"),
    ({"tool_choice": {"type": "tool", "name": "x"}, "tools": TOOLS}, "tool_choice", "none of the tools"),
    ({"thinking": {"type": "enabled", "budget_tokens": 500}}, "thinking.budget_tokens", "less than 'max_tokens'"),
    ({"thinking": {"type": "enabled", "budget_tokens": 50}}, "thinking.budget_tokens", "no reasoning"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "required"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config.format.schema",
     "type must be"),
    ({"mcp_servers": [{}]}, "mcp_servers", "not supported"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management", "not supported"),
    ({"unknown": 1}, "unknown", "Unrecognized"),
]  # fmt: skip


def test_claude_code_may_ask_to_keep_all_reasoning(server: HttpServer) -> None:
    """Claude Code sends this field with every request. The server accepts the field, because it always keeps earlier
    reasoning.
    """
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert server.post("/v1/messages", body_of(context_management=kept)).status_code == 200


@pytest.mark.parametrize(("change", "param", "text"), WRONG, ids=[f"{param} {text}" for _, param, text in WRONG])
def test_a_wrong_request(server: HttpServer, change: dict[str, Any], param: str, text: str) -> None:
    response = server.post("/v1/messages", {k: v for k, v in body_of(**change).items() if v is not None})
    error = response.json()
    assert (response.status_code, error["type"]) == (400, "error")
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["param"] == param
    assert text in error["error"]["message"]
    assert server.engine.submitted == []


def test_errors_have_the_clients_classes(client: anthropic.Anthropic, server: HttpServer) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(client, model="other")
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    server.engine.fail_after = 0
    with pytest.raises(anthropic.InternalServerError) as failed:
        ask(client)
    assert failed.value.body["error"]["type"] == "api_error"  # type: ignore[index]
    server.engine.fail_after = 2
    with pytest.raises(anthropic.APIStatusError) as ended:
        stream(client)
    assert ended.value.body["error"]["type"] == "api_error"  # type: ignore[index]
    response = server.http.get("/v1/messages")
    assert (response.status_code, response.json()["type"]) == (405, "error")
    assert "type" not in server.http.get("/v1/chat/completions").json()


def test_keys_and_the_audit_log(tokenizer: Tokenizer, tmp_path: Path) -> None:
    access = access_for(tmp_path, "alice")
    with running(FakeEngine(tokenizer), access) as server:
        for key in ({"api_key": secret_of("alice")}, {"auth_token": secret_of("alice"), "api_key": None}):
            with anthropic.Anthropic(base_url=server.url, max_retries=0, timeout=time_limit(10), **key) as client:
                assert client.messages.create(**body_of(max_tokens=4)).usage.output_tokens == 4
                assert client.messages.count_tokens(model=MODEL_NAME, messages=ASK).input_tokens > 0
        wrong = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0, timeout=time_limit(10))
        with wrong, pytest.raises(anthropic.AuthenticationError) as caught:
            wrong.messages.create(**body_of(max_tokens=4))
        assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        assert server.engine.submitted[0].scheduling.tenant == "alice"
