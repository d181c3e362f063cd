"""Tests ``/v1/responses`` with OpenAI's own client: answers, streams, tools, reasoning, the store and refused requests.
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

openai = LazyModule("openai")

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Returns the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS: list[Any] = [WEATHER, {"type": "function", "name": "now"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{{ reasoning_effort }}<|assistant|>"
)
THINKING = TEMPLATE + "{% if false %}<think></think>{% endif %}"
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


def client_of(server: HttpServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=time_limit(10))


@pytest.fixture
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.responses.create(**({"model": MODEL_NAME, "input": "Weather?"} | more))


def stream(client: openai.OpenAI, **more: Any) -> tuple[list[Any], Any]:
    """Returns the events of a stream, which the client has parsed, and the response that the client has collected."""
    with client.responses.stream(**({"model": MODEL_NAME, "input": "Weather?"} | more)) as events:
        found = list(events)
        return found, events.get_final_response()


def plain(response: Any) -> list[dict[str, Any]]:
    """Returns the output items without ids and without the fields that the client has added."""
    dropped = ("id", "call_id", "parsed", "parsed_arguments")
    found = []
    for item in response.to_dict()["output"]:
        item = {name: value for name, value in item.items() if name not in dropped}
        if "content" in item:
            item["content"] = [{k: v for k, v in part.items() if k not in dropped} for part in item["content"]]
        found.append(item)
    return found


def say_exactly(engine: FakeEngine, text: str) -> None:
    """Lets every request return ``text`` without the space that the tokenizer adds at the start."""
    _, *tokens = engine.tokenizer.encode(text, add_special_tokens=False)
    engine.script = lambda prompt, sampling: [*tokens, END]


def prompt_of(server: HttpServer) -> str:
    return server.engine.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids, skip_special_tokens=False)


def test_an_answer(client: openai.OpenAI, server: HttpServer) -> None:
    server.engine.say("It rains.")
    server.engine.num_cached_tokens = 3
    response = ask(client, instructions="Be short.", temperature=0.5, top_p=0.9, metadata={"a": "b"})
    assert (response.object, response.status, response.model) == ("response", "completed", MODEL_NAME)
    assert response.output_text == "It rains."
    assert (response.temperature, response.top_p, response.metadata) == (0.5, 0.9, {"a": "b"})
    submitted = server.engine.submitted[-1]
    assert response.usage.input_tokens == len(submitted.prompt_token_ids)
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.usage.output_tokens == submitted.num_tokens
    assert "<system>Be short.<user>Weather?<|assistant|>" in prompt_of(server)


def test_the_answer_is_that_of_a_chat(client: openai.OpenAI, server: HttpServer) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Weather?"}]
    answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 7}).json()
    response = ask(client, instructions="Be short.", max_output_tokens=7)
    first, second = server.engine.submitted
    assert first.prompt_token_ids == second.prompt_token_ids
    assert response.output_text == answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("pieces", [1, 3, 100])
def test_a_stream_equals_the_whole(client: openai.OpenAI, server: HttpServer, pieces: int) -> None:
    server.engine.tokens_per_piece = pieces
    server.engine.say(f"I look.\n{CALL}")
    whole = ask(client, tools=TOOLS)
    events, response = stream(client, tools=TOOLS)
    assert plain(response) == plain(whole)
    assert (response.status, response.usage) == (whole.status, whole.usage)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-2:] == ["response.output_item.done", "response.completed"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "I look."
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == {"city": "Bern"}


def test_a_tool_call_and_its_result(client: openai.OpenAI, server: HttpServer) -> None:
    server.engine.say(f"I look.\n{CALL}")
    first = ask(client, tools=TOOLS)
    message, call = first.output
    assert (message.type, call.type, call.name, json.loads(call.arguments)) == (
        "message", "function_call", "weather", {"city": "Bern"},
    )  # fmt: skip
    server.engine.say("Rain.")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    end = '<user>Weather?<assistant>I look.<tool_call>weather {"city": "Bern"}<tool>rain<|assistant|>'
    assert ask(client, tools=TOOLS, previous_response_id=first.id, input=[result]).output_text == "Rain."
    assert end in prompt_of(server)
    history: list[Any] = [{"role": "user", "content": "Weather?"}, *first.to_dict()["output"], result]
    assert ask(client, tools=TOOLS, input=history).output_text == "Rain."
    assert end in prompt_of(server)


def test_the_choice_of_tools(client: openai.OpenAI, server: HttpServer) -> None:
    say_exactly(server.engine, CALL)
    for choice in ("required", {"type": "function", "name": "weather"}):
        response = ask(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        assert [item.name for item in response.output] == ["weather"]
        assert server.engine.submitted[-1].constraint is not None
    assert [item.type for item in ask(client, tools=TOOLS, tool_choice="none").output] == ["message"]
    assert "weather" not in prompt_of(server)


@pytest.mark.parametrize("pieces", [1, 4, 100])
def test_reasoning_is_an_item(
    client: openai.OpenAI, server: HttpServer, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    set_template(server, THINKING, monkeypatch)
    server.engine.tokens_per_piece = pieces
    say_exactly(server.engine, "<think>\nHm.\n</think>\n\nRain.")
    response = ask(client, reasoning={"effort": "high"})
    assert "Weather?high<|assistant|>" in prompt_of(server)
    thought, message = response.output
    assert (thought.content[0].text, message.content[0].text) == ("Hm.", "Rain.")
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    events, collected = stream(client)
    assert plain(collected) == plain(response)
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "Hm."
    ask(client, previous_response_id=collected.id, input="So?")
    assert "<assistant>Rain.(Hm.)<user>So?" in prompt_of(server)


def test_a_schema_of_the_text(client: openai.OpenAI, server: HttpServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    say_exactly(server.engine, '{"a": 12}')
    response = ask(client, text={"format": {"type": "json_schema", "name": "x", "schema": schema}})
    assert json.loads(response.output_text) == {"a": 12}
    assert server.engine.submitted[-1].constraint is not None


@pytest.mark.parametrize("length", [2, 8, 14, 20])
def test_an_answer_that_is_cut(client: openai.OpenAI, server: HttpServer, length: int) -> None:
    say_exactly(server.engine, CALL)
    whole = ask(client, tools=TOOLS, max_output_tokens=length)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    body = {"input": "Weather?", "tools": TOOLS, "max_output_tokens": length, "stream": True}
    last = server.post("/v1/responses", body).text.strip().rpartition("data: ")[2]
    assert json.loads(last)["type"] == "response.incomplete"
    texts = [[item.get("arguments"), item.get("content")] for item in json.loads(last)["response"]["output"]]
    assert texts == [[item.get("arguments"), item.get("content")] for item in whole.to_dict()["output"]]


def test_the_store(client: openai.OpenAI, server: HttpServer) -> None:
    server.engine.say("It rains.")
    first = ask(client, instructions="Be short.")
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    second = stream(client, input="Sure?", previous_response_id=first.id)[1]
    assert "<user>Weather?<assistant>It rains.<user>Sure?<|assistant|>" in prompt_of(server)
    assert "Be short." not in prompt_of(server)
    assert client.responses.retrieve(second.id).output_text == "It rains."
    client.responses.delete(first.id)
    for again in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            again(first.id)
        assert caught.value.code == "response_not_found"
    unstored = ask(client, store=False)
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, previous_response_id=unstored.id)
    assert caught.value.param == "previous_response_id"


def test_the_input_items_of_a_response(client: openai.OpenAI, server: HttpServer) -> None:
    server.engine.say(f"I look.\n{CALL}")
    first = ask(client, tools=TOOLS)
    server.engine.say("Rain.")
    part = {"type": "input_text", "text": "Sure?"}
    given: Any = [
        {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "rain"},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": [part, part]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}], "summary": []},
        {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [part, part]},
    ]
    second = ask(client, tools=TOOLS, previous_response_id=first.id, input=given)
    items: Any = client.responses.input_items
    found = [item.to_dict() for item in items.list(second.id, order="asc", limit=2)]  # in five pages
    assert [item["type"] for item in found] == [
        "message", "message", "function_call", "function_call_output", "message", "message", "reasoning",
        "function_call", "function_call_output",
    ]  # fmt: skip
    assert found[0]["content"] == [{"type": "input_text", "text": "Weather?"}]
    assert found[1:3] == first.to_dict()["output"]
    assert (found[3]["output"], found[4]["content"][0]["text"]) == ("rain", "It rains.")
    assert (found[4]["role"], found[5]["role"], found[5]["content"]) == ("assistant", "user", [part, part])
    assert (found[6]["content"][0]["text"], found[7]["name"], found[8]["output"]) == ("Hm.", "now", [part, part])
    assert len({item["id"] for item in found}) == len(found)
    assert [item.id for item in items.list(second.id)] == [item["id"] for item in reversed(found)]
    assert [item.id for item in items.list(second.id, after=found[1]["id"])] == [found[0]["id"]]
    assert [item.id for item in items.list(first.id)] == [found[0]["id"]]


def test_wrong_questions_for_input_items(client: openai.OpenAI, server: HttpServer) -> None:
    path = f"/v1/responses/{ask(client).id}/input_items"
    for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=x", "after"),
                         ("include%5B%5D=x", "include[]"), ("before=x", "before")):  # fmt: skip
        reply = server.http.get(f"{path}?{query}", headers={"Authorization": "Bearer none"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_x")


def test_each_key_has_its_own_responses(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with running(FakeEngine(tokenizer), access_for(tmp_path, "alice", "bob")) as server:
        alice, bob = (client_of(server, secret_of(name)) for name in ("alice", "bob"))
        with alice, bob:
            response = ask(alice, max_output_tokens=4)
            assert alice.responses.retrieve(response.id).id == response.id
            for refused in (bob.responses.retrieve, bob.responses.input_items.list, bob.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    refused(response.id)
            with pytest.raises(openai.NotFoundError):
                ask(bob, previous_response_id=response.id)
            assert alice.responses.retrieve(response.id).id == response.id


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "Missing"),
    ({"input": []}, "input", "at least 1"),
    ({"input": [{"type": "web_search_call"}]}, "input", "web_search_call"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content", "input_file"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}, "input[0].content[0]",
     "this model reads only text"),
    ({"max_output_tokens": 5000}, "max_output_tokens", "4096"),
    ({"temperature": 3.0}, "temperature", "less than or equal to 2"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "weather"),
    ({"tools": [{"type": "function", "name": "a", "parameters": {"type": "array"}}]}, "tools[0].parameters", "object"),
    ({"tools": [WEATHER, {"type": "function", "name": "a", "parameters": {"properties": {"a": {"not": {}}}}}]},
     "tools[1].parameters", "'tools[1].parameters' cannot be used: Unimplemented keys: [\"not\"]"),
    ({"tool_choice": "maybe"}, "tool_choice", "maybe"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"tool_choice": {"type": "function", "name": "x"}, "tools": TOOLS}, "tool_choice", "none of the tools"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "Missing"),
    ({"background": True}, "background", "not supported"),
    ({"include": ["web_search_call.results"]}, "include[0]", "message.output_text.logprobs"),
    ({"top_logprobs": 2}, "top_logprobs", "include"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs", "20"),
    ({"truncation": "auto"}, "truncation", "not supported"),
    ({"unknown": 1}, "unknown", "Unrecognized"),
]


@pytest.mark.parametrize(("change", "param", "text"), WRONG, ids=[f"{param} {text}" for _, param, text in WRONG])
def test_a_wrong_request(server: HttpServer, change: dict[str, Any], param: str, text: str) -> None:
    body = {"input": "Weather?"} | change
    response = server.post("/v1/responses", {name: value for name, value in body.items() if value is not None})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert text in error["message"]
    assert server.engine.submitted == []


def test_failures(client: openai.OpenAI, server: HttpServer) -> None:
    server.engine.fail_after = 0
    with pytest.raises(openai.InternalServerError):
        ask(client)
    server.engine.fail_after = 2
    text = server.post("/v1/responses", {"input": "Weather?", "stream": True}).text
    last = json.loads(text.strip().rpartition("data: ")[2])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "engine_error"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(last["response"]["id"])
