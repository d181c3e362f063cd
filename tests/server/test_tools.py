"""Tests tools in chats: what the model sees, how calls are returned and streamed, and which requests are refused.

The fake engine checks that the script's tokens fit the grammar of the request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest

from llm_serving.constraints import calls as calls_module
from llm_serving.constraints.grammar import MAX_COMPOSED_BYTES
from llm_serving.engine.chat_template import ChatTemplate
from llm_serving.engine.tokenizer import Tokenizer
from support.call_fixtures import fixtures_of
from support.fake_engine import MODEL_NAME, FakeEngine
from support.http_server import HttpServer, running
from support.lazy_module import LazyModule
from support.time_limits import time_limit

openai = LazyModule("openai")

ASK: list[Any] = [{"role": "user", "content": "Weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Returns the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now", "strict": True}}
TOOLS: list[Any] = [WEATHER, NOW]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}<|assistant|>"
)
END = 2
URL = "/v1/chat/completions"


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
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=time_limit(10)) as client:
        yield client


def ask(client: openai.OpenAI, **more: Any) -> Any:
    body: dict[str, Any] = {"model": MODEL_NAME, "messages": ASK, "tools": TOOLS}
    return client.chat.completions.create(**(body | more))


def say_exactly(engine: FakeEngine, text: str) -> None:
    """Lets every request return ``text`` without the space that the tokenizer adds at the start."""
    space, *tokens = engine.tokenizer.encode(text, add_special_tokens=False)
    assert engine.tokenizer.token_bytes(space) == b" "
    engine.script = lambda prompt, sampling: [*tokens, END]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def prompt_of(server: HttpServer) -> str:
    return server.engine.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids, skip_special_tokens=False)


def test_a_call(client: openai.OpenAI, server: HttpServer) -> None:
    server.engine.say(f"I look.\n{CALL}")
    [choice] = ask(client).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert calls_of(choice.message) == [("weather", {"city": "Bern"})]
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert prompt_of(server).startswith('[{"type": "function", "function": {"name": "weather", "description"')


def test_a_text_without_a_call(client: openai.OpenAI, server: HttpServer) -> None:
    server.engine.say("Hello. ")
    [choice] = ask(client).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "Hello. ", None)


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_streamed_call(client: openai.OpenAI, server: HttpServer, pieces: int) -> None:
    server.engine.say(f"I look.\n{CALL}\n{CALL.replace('Bern', 'Rio')}")
    server.engine.tokens_per_piece = pieces
    content, calls, finish = "", {}, []
    for chunk in ask(client, stream=True):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.id:
                calls[call.index] = [call.id, call.type, call.function.name, call.function.arguments]
            else:
                calls[call.index][3] += call.function.arguments
        if choice.finish_reason:
            finish.append(choice.finish_reason)
    assert (content, finish) == ("I look.", ["tool_calls"])
    assert [call[1:] for call in calls.values()] == [
        ["function", "weather", '{"city": "Bern"}'], ["function", "weather", '{"city": "Rio"}'],
    ]  # fmt: skip
    assert len({call[0] for call in calls.values()}) == 2


def test_the_arguments_are_streamed_while_they_are_written(client: openai.OpenAI, server: HttpServer) -> None:
    server.engine.say(CALL.replace("Bern", "a long name of a town"))
    deltas = [chunk.choices[0].delta for chunk in ask(client, stream=True)]
    assert sum(bool(delta.tool_calls) for delta in deltas) > 8


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_ends_with_the_reason_length(server: HttpServer, stream: bool) -> None:
    server.engine.say(CALL)
    body = {"messages": ASK, "tools": TOOLS, "max_tokens": 45, "stream": stream}
    response = server.post(URL, body)
    assert response.status_code == 200, response.text
    assert '"finish_reason":"length"' in response.text


def test_several_choices_and_log_probabilities(client: openai.OpenAI, server: HttpServer) -> None:
    server.engine.say(CALL)
    whole = ask(client, n=2, logprobs=True)
    assert [calls_of(choice.message) for choice in whole.choices] == [[("weather", {"city": "Bern"})]] * 2
    tokens = len(server.engine.submitted[-1].prompt_token_ids) and whole.usage.completion_tokens // 2
    assert [len(choice.logprobs.content) for choice in whole.choices] == [tokens] * 2
    streamed: dict[int, int] = {}
    ids: dict[int, list[int]] = {}
    for chunk in ask(client, n=2, logprobs=True, stream=True, extra_body={"return_token_ids": True}):
        [choice] = chunk.choices
        streamed[choice.index] = streamed.get(choice.index, 0) + len(choice.logprobs.content if choice.logprobs else [])
        ids.setdefault(choice.index, []).extend(choice.model_extra.get("token_ids", []))
    assert streamed == {0: tokens, 1: tokens}
    assert [len(each) for each in ids.values()] == [tokens] * 2


def test_a_conversation_with_calls(client: openai.OpenAI, server: HttpServer) -> None:
    server.engine.say(CALL)
    message = ask(client).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    server.engine.say("It is sunny.")
    answer = ask(client, messages=[*ASK, message.model_dump(exclude_none=True), result]).choices[0].message
    assert answer.content == "It is sunny."
    assert 'assistant: None<tool_call>weather {"city": "Bern"}tool: sunny<|assistant|>' in prompt_of(server)


def test_a_template_without_tools_describes_them(
    client: openai.OpenAI, server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_template(server, "{% for m in messages %}({{ m.role }}) {{ m.content }}{% endfor %}<|assistant|>", monkeypatch)
    server.engine.say(CALL)
    first = ask(client).choices[0].message
    prompt = prompt_of(server)
    assert "(system) You can call functions." in prompt
    assert '{"type": "function", "function": {"name": "weather"' in prompt
    results = [{"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": text} for text in ("sun", "rain")]
    ask(client, messages=[{"role": "system", "content": "Be kind."}, *ASK, first, *results])
    prompt = prompt_of(server)
    assert "(system) Be kind.\n\nYou can call functions." in prompt
    assert f"(assistant) {CALL}" in prompt
    assert "(user) <tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response><|ass" in prompt


def test_arguments_as_text_for_templates_that_expect_text(
    client: openai.OpenAI, server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% if tools %}{% endif %}{% for c in messages[1].tool_calls or [] %}{{ c['function']['arguments'] + '!' }}"
        "{% endfor %}<tool_call><|assistant|>"
    )
    set_template(server, template, monkeypatch)
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a":1}'}}
    ask(client, messages=[*ASK, {"role": "assistant", "tool_calls": [call]}])
    assert '{"a": 1}!' in prompt_of(server)


def test_a_template_of_its_own_for_tools(
    client: openai.OpenAI, server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_template(server, "plain{{ messages[0].content }}<|assistant|>", monkeypatch)
    source = "{% if tools %}with tools{% endif %}[TOOL_CALLS]<|assistant|>"
    monkeypatch.setattr(server.engine.tokenizer, "tool_template", ChatTemplate(source, {}))
    say_exactly(server.engine, '[TOOL_CALLS] [{"name": "now", "arguments": {}}]')
    assert calls_of(ask(client).choices[0].message) == [("now", {})]
    assert prompt_of(server).startswith("with tools")
    client.chat.completions.create(model=MODEL_NAME, messages=ASK)
    assert prompt_of(server).startswith("plainWeather?")


def test_the_choice_none_hides_the_tools(client: openai.OpenAI, server: HttpServer) -> None:
    server.engine.say(CALL)
    [choice] = ask(client, tool_choice="none").choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", CALL, None)
    assert prompt_of(server).startswith("user: Weather?")
    assert server.engine.submitted[-1].constraint is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_required_calls(client: openai.OpenAI, server: HttpServer, choice: Any) -> None:
    say_exactly(server.engine, CALL)
    assert calls_of(ask(client, tool_choice=choice).choices[0].message) == [("weather", {"city": "Bern"})]
    ask(client, tool_choice=choice, max_tokens=1)
    constraint = server.engine.submitted[-1].constraint
    assert constraint is not None
    assert not constraint.mask()[0] >> END & 1, "the answer is a call"


def test_one_call_without_parallel_calls(client: openai.OpenAI, server: HttpServer) -> None:
    server.engine.say(CALL)
    ask(client, parallel_tool_calls=False)
    loose = [{"type": "function", "function": {**tool["function"], "strict": False}} for tool in TOOLS]
    server.engine.say(f"{CALL}\n{CALL}")
    message = ask(client, tools=loose, parallel_tool_calls=False).choices[0].message
    assert len(message.tool_calls) == 1


def test_tools_that_are_not_strict_are_only_parsed(client: openai.OpenAI, server: HttpServer) -> None:
    loose = [{"type": "function", "function": {**tool["function"], "strict": False}} for tool in TOOLS]
    server.engine.say(CALL.replace('"city": "Bern"', '"other": [1]'))
    assert calls_of(ask(client, tools=loose).choices[0].message) == [("weather", {"other": [1]})]
    assert server.engine.submitted[-1].constraint is None


def test_content_with_a_schema_or_a_call(client: openai.OpenAI, server: HttpServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for text in (CALL, '{"a": 1}'):
        say_exactly(server.engine, text)
        message = ask(client, response_format=form).choices[0].message
        assert (bool(message.tool_calls), message.content) in ((True, None), (False, '{"a": 1}'))


@pytest.mark.parametrize("name", ["mistral", "mistral_args", "qwen3_coder", "llama3_json", "pythonic", "hermes"])
def test_the_format_of_the_config(tokenizer: Tokenizer, name: str) -> None:
    fixture = next(one for one in fixtures_of(name) if one.name == "several")
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}}
    parameters = {"type": "object", "properties": properties}
    engine = FakeEngine(tokenizer)
    say_exactly(engine, fixture.text)
    with running(engine, max_context=4096, max_prompt_tokens=4000, tool_format=name) as server:
        tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
        choice = server.post(URL, {"messages": ASK, "tools": tools}).json()["choices"][0]
        [call] = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Rio", "days": 2, "exact": True}
        assert len(call["id"]) == (9 if name.startswith("mistral") else 29)


FETCH = {
    "name": "fetch",
    "parameters": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "url": {"type": "string", "format": "uri"},
            "prompt": {"type": "string", "minLength": 1},
            "name": {"type": "string", "pattern": "^[a-z]+$"},
        },
        "required": ["url"],
        "minProperties": 1,
        "additionalProperties": False,
    },
}
"""A tool like those of Claude Code: its schema has keywords that the format qwen3_coder cannot enforce."""


def test_a_format_that_cannot_enforce_a_schema_refuses_it_only_if_the_tool_is_strict(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer)
    say_exactly(engine, "<tool_call>\n<function=fetch>\n<parameter=url>\na b\n</parameter>\n</function>\n</tool_call>")
    with running(engine, max_context=4096, max_prompt_tokens=4000, tool_format="qwen3_coder") as server:

        def ask_with(**more: Any) -> Any:
            tools = [NOW, {"type": "function", "function": FETCH | more}]
            return server.post(URL, {"messages": ASK, "tools": tools, "tool_choice": "auto"})

        [call] = ask_with().json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"url": "a b"}
        anthropic = {"name": "fetch", "input_schema": FETCH["parameters"]}
        answer = server.post("/v1/messages", {"messages": ASK, "max_tokens": 200, "tools": [anthropic]})
        assert answer.json()["content"][0]["input"] == {"url": "a b"}
        refused = ask_with(strict=True)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "tools[1].function.parameters")
        assert "'minProperties' cannot be enforced in the format of this model" in error["message"]
        assert "set 'strict' to false" in error["message"]


def test_special_tokens_reach_the_parser(
    client: openai.OpenAI, server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is found although its marker <tool_call> is a special token, which the detokenizer leaves out of texts.
    """
    tokenizer = server.engine.tokenizer
    monkeypatch.setattr(tokenizer, "token_id", lambda piece: 3 if piece == "<tool_call>" else None)
    monkeypatch.setattr(tokenizer.table, "bytes_of", _with_marker(tokenizer.table.bytes_of))
    monkeypatch.setitem(tokenizer.table.texts, 3, "<tool_call>")
    body = tokenizer.encode(CALL.removeprefix("<tool_call>"), add_special_tokens=False)
    tokens = [*tokenizer.encode("Well", add_special_tokens=False), 3, *body, 2]
    server.engine.script = lambda prompt, sampling: tokens
    loose = [{"type": "function", "function": {"name": "weather", "strict": False}}]
    assert calls_of(ask(client, tools=loose).choices[0].message) == [("weather", {"city": "Bern"})]
    text = client.chat.completions.create(model=MODEL_NAME, messages=ASK).choices[0].message.content
    assert text is not None
    assert "<tool_call>" not in text


def _with_marker(original: Any) -> Any:
    return lambda token_id: b"<tool_call>" if token_id == 3 else original(token_id)


def function(**changes: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **changes}}]}


def calls(**changes: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}} | changes
    return {"messages": [*ASK, {"role": "assistant", "tool_calls": [call]}]}


UNENFORCEABLE = {"properties": {"a": {"not": {}}}}
WRONG = {
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "Missing required"),
    "no function": ({"tools": [{"type": "function"}]}, "tools[0].function", "Missing required"),
    "no type": ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", "Missing required"),
    "another type": ({"tools": [{"type": "code", "function": {"name": "f"}}]}, "tools[0].type", "'function'"),
    "empty name": (function(name=""), "tools[0].function.name", "match pattern"),
    "name with a space": (function(name="a b"), "tools[0].function.name", "match pattern"),
    "name with a newline": (function(name="a\n"), "tools[0].function.name", "match pattern"),
    "long name": (function(name="a" * 65), "tools[0].function.name", "at most 64"),
    "unknown member": (function(other=1), "tools[0].function.other", "Unrecognized"),
    "arguments that are no object": (function(parameters={"type": "array"}), "tools[0].function.parameters",
                                     "arguments are always an object"),
    "parameters as text": (function(parameters="{}"), "tools[0].function.parameters", "should be an object"),
    "the same name twice": ({"tools": [NOW, WEATHER, NOW]}, "tools", "two tools named \"now\" ([0] and [2])"),
    "too many tools": ({"tools": [NOW] * 129}, "tools", "at most 128"),
    "large tools": (function(description="x" * 70_000), "tools", "the maximum is 65536"),
    "keyword that cannot be enforced": (function(parameters=UNENFORCEABLE), "tools[0].function.parameters",
                                        'keys: ["not"]. Change the schema, or set \'strict\' to false'),
    "keyword in the last tool": ({"tools": [WEATHER, NOW, function(parameters=UNENFORCEABLE)["tools"][0]]},
                                 "tools[2].function.parameters", "not"),
    "keyword in the chosen tool": ({**function(parameters=UNENFORCEABLE), "tool_choice": "required"},
                                   "tools[0].function.parameters", "not"),
    "content that cannot be enforced": ({"tools": [WEATHER], "response_format": {
                                            "type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
                                        "response_format.json_schema.schema", "not"),
    "unknown choice": ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "'required' or {"),
    "choice of another tool": ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
                               "tool_choice", "names \"g\", which is none of the tools"),
    "choice without tools": ({"tool_choice": "required"}, "tool_choice", "only allowed with 'tools'"),
    "beams": ({"tools": TOOLS, "use_beam_search": True}, "use_beam_search",
              "this text may be a call. Leave out 'use_beam_search', or set 'tool_choice' to 'none'"),
    "ignore_eos": ({"tools": TOOLS, "ignore_eos": True}, "ignore_eos",
                   "decides where the text ends. Leave out 'ignore_eos'"),
    "regex and tools": ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex",
                        "leave out one of them"),
    "budget without reasoning": ({"thinking_token_budget": 5}, "thinking_token_budget", "has no reasoning"),
    "arguments that are no JSON": (calls(function={"name": "f", "arguments": "{a"}),
                                   "messages[1].tool_calls[0].function.arguments", "JSON object"),
    "call without a name": (calls(function={"arguments": "{}"}), "messages[1].tool_calls[0].function.name", "Missing"),
    "result without a call": ({"messages": [*ASK, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id",
                              "Missing"),
    "call of a user": ({"messages": [calls()["messages"][1] | {"role": "user", "content": "x"}]},
                       "messages[0].tool_calls", "role 'assistant'"),
    "result of a user": ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]},
                         "messages[0].tool_call_id", "role 'tool'"),
    "assistant without content": ({"messages": [*ASK, {"role": "assistant"}]}, "messages[1].content", "Missing"),
}  # fmt: skip


def test_a_grammar_is_not_composed_beyond_its_maximum_length(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format qwen3_coder copies ``$defs`` for each parameter with a reference."""
    made, original = [], calls_module._json
    monkeypatch.setattr(calls_module, "_json", lambda schema: made.append(original(schema)) or made[-1])
    definitions = {f"d{i}": {"type": "integer", "minimum": i} for i in range(900)}
    many = {f"p{i}": {"type": "array", "items": {"$ref": "#/$defs/d1"}} for i in range(400)}
    schema = {"type": "object", "$defs": definitions, "properties": many}
    with running(FakeEngine(tokenizer), max_context=4096, max_prompt_tokens=4000, tool_format="qwen3_coder") as server:
        set_template(server, "{% if tools %}{% endif %}<|assistant|>", monkeypatch)
        monkeypatch.setattr(server.app.state.grammars, "problem_of", None)
        tools = function(name="f", parameters=schema)
        response = server.post(URL, {"messages": ASK, "tool_choice": "required", **tools})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "tools", "invalid_value")
    assert f"more than {MAX_COMPOSED_BYTES} bytes" in error["message"]
    assert len(made) < 20


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_are_refused(server: HttpServer, name: str) -> None:
    fields, param, reason = WRONG[name]
    response = server.post(URL, {"messages": ASK} | fields)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert reason in error["message"]
    assert server.engine.submitted == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (URL, {"messages": ASK, "reasoning_effort": "high"}),
        ("/v1/responses", {"input": "Weather?", "reasoning": {"effort": "high"}}),
        ("/v1/messages", {"messages": ASK, "max_tokens": 9, "output_config": {"effort": "high"}}),
        ("/v1/messages/count_tokens", {"messages": ASK, "output_config": {"effort": "high"}}),
    ],
)
def test_an_effort_has_no_effect_on_a_model_without_reasoning(
    server: HttpServer, path: str, body: dict[str, Any]
) -> None:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    assert all("high" not in prompt_of(server) for _ in server.engine.submitted)


def test_the_server_shows_its_formats(server: HttpServer) -> None:
    model = server.http.get("/server_info").json()["model"]
    assert (model["tool_format"], model["reasoning_format"]) == ("hermes", None)


def test_tools_that_are_only_together_too_large(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tool has an allowed number of symbols, but not all of them together. So the error names no single tool."""
    names = [f"{i:x}" for i in range(100)]
    schema = {"properties": {name: {} for name in names}, "anyOf": [{"required": [name]} for name in names[:40]]}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(10)]
    set_template(server, "{% if tools %}{% endif %}<tool_call><|assistant|>", monkeypatch)
    server.engine.say("Hello.")
    assert server.post(URL, {"messages": ASK, "tools": tools[:1]}).status_code == 200
    response = server.post(URL, {"messages": ASK, "tools": tools})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert "more than 100000 symbols of the grammar, the limit max_grammar_size" in response.json()["error"]["message"]


def test_tools_can_be_turned_off(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(tokenizer), tool_format="none") as server:
        error = server.post(URL, {"messages": ASK, "tools": TOOLS}).json()["error"]
        assert (error["param"], "turned off" in error["message"]) == ("tools", True)


def test_without_grammars_calls_are_only_parsed(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer)
    engine.say(CALL.replace("city", "other"))
    with running(engine, max_context=4096, max_prompt_tokens=4000, structured_outputs=False) as server:
        body: dict[str, Any] = {"messages": ASK, "tools": [WEATHER]}
        assert server.post(URL, body).json()["choices"][0]["finish_reason"] == "tool_calls"
        for more in ({"tool_choice": "required"}, {"tools": [NOW]}):
            error = server.post(URL, body | more).json()["error"]
            assert (error["param"], "turned off" in error["message"]) == ("tools", True)


def test_structured_output_can_be_turned_off(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(tokenizer), structured_outputs=False) as server:
        body = {"prompt": "x", "max_tokens": 1}
        refused = server.post("/v1/completions", body | {"response_format": {"type": "json_object"}})
        assert (refused.status_code, "turned off" in refused.json()["error"]["message"]) == (400, True)
        assert server.post("/v1/completions", body | {"response_format": {"type": "text"}}).status_code == 200


def test_tokenize_sees_the_tools(server: HttpServer) -> None:
    lengths = [server.post("/tokenize", {"messages": ASK} | more).json()["count"] for more in ({}, {"tools": TOOLS})]
    assert lengths[1] > lengths[0] + 50


def test_the_clients_own_collection_of_a_stream(client: openai.OpenAI, server: HttpServer) -> None:
    server.engine.say(f"I look.\n{CALL}\n{CALL.replace('Bern', 'Rio')}")
    with client.chat.completions.stream(model=MODEL_NAME, messages=ASK, tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert (final.finish_reason, final.message.content) == ("tool_calls", "I look.")
    assert calls_of(final.message) == [("weather", {"city": "Bern"}), ("weather", {"city": "Rio"})]
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.arguments for event in done] == ['{"city": "Bern"}', '{"city": "Rio"}']


def test_the_clients_tools_of_pydantic_classes(client: openai.OpenAI, server: HttpServer) -> None:
    class Weather(pydantic.BaseModel):
        city: str
        days: int | None = None

    say_exactly(
        server.engine, '<tool_call>\n{"name": "Weather", "arguments": {"city": "Bern", "days": null}}\n</tool_call>'
    )
    parsed = client.chat.completions.parse(
        model=MODEL_NAME, messages=ASK, tools=[openai.pydantic_function_tool(Weather)], tool_choice="required"
    )
    [call] = parsed.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Weather(city="Bern")
