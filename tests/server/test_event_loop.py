"""Tests that large inputs do not block the event loop, and that the metric of its stalls shows a planted stall."""

from __future__ import annotations

import asyncio
import json
import resource
import threading
import time

import pytest
from pydantic import ValidationError
from uvicorn.protocols.http.flow_control import FlowControl

from llm_serving.constraints import grammar
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.server.fields.shared import EarlierCall
from llm_serving.server.generation import prompts
from llm_serving.server.http import body as body_module
from llm_serving.server.http import protocol as http_protocol
from llm_serving.server.http.protocol import BoundedHttpProtocol
from llm_serving.server.limits import (
    INLINE_CHAT_CHARS,
    INLINE_ITEMS,
    INLINE_MESSAGES,
    MAX_ARGUMENT_VALUES,
    MAX_DETOKENIZE,
    MAX_JSON_OBJECTS,
    MAX_JSON_VALUES,
)
from llm_serving.server.messages import endpoints as messages
from llm_serving.server.messages.fields import CountRequest
from llm_serving.server.openai.chat import ChatRequest
from llm_serving.server.responses import endpoints as responses
from llm_serving.server.responses.fields import ResponsesRequest
from support.fake_engine import FakeEngine
from support.http_server import http_request, read_response, running, wait_until
from support.time_limits import time_limit

STALL_S = 0.3


def stall(server, kind="stall"):
    text = server.http.get("/metrics").text
    name = f"llm_serving_event_loop_longest_{kind}_seconds "
    [line] = [line for line in text.splitlines() if line.startswith(name)]
    return float(line.split()[1])


def block(server, work):
    done = threading.Event()
    server._loop.call_soon_threadsafe(lambda: (work(), done.set()))
    assert done.wait(time_limit(10))


def test_a_stall_is_in_the_metrics_once(server):
    stall(server)
    block(server, lambda: time.sleep(STALL_S))
    assert stall(server) >= STALL_S - 0.05
    server._loop.call_soon_threadsafe(lambda: None)
    assert stall(server) != pytest.approx(STALL_S, abs=0.001)


def test_a_stall_reports_the_processor_time_that_the_server_used(server):
    def work():
        until = time.thread_time() + STALL_S
        while time.thread_time() < until:
            pass

    stall(server)
    block(server, work)
    assert stall(server, "busy") >= STALL_S - 0.05
    block(server, lambda: time.sleep(STALL_S))
    assert stall(server, "busy") < STALL_S / 2


@pytest.fixture
def large_server(tokenizer):
    with running(FakeEngine(tokenizer), max_body_bytes=8 << 20) as server:
        yield server


@pytest.mark.parametrize("count", [INLINE_ITEMS, INLINE_ITEMS + 1])
def test_many_tokens_are_decoded_in_another_thread(large_server, monkeypatch, count):
    threads = []
    original = Tokenizer.decode

    def decode(*args):
        threads.append(threading.current_thread())
        return original(*args)

    monkeypatch.setattr(Tokenizer, "decode", decode)
    assert large_server.post("/detokenize", {"tokens": [300] * count}).status_code == 200
    assert [thread is large_server._thread for thread in threads] == [count <= INLINE_ITEMS]


def test_too_many_tokens_are_not_decoded(large_server):
    answer = large_server.post("/detokenize", {"tokens": [300] * (MAX_DETOKENIZE + 1)})
    assert answer.status_code == 400
    assert f"at most {MAX_DETOKENIZE} items" in answer.json()["error"]["message"]


def watch(monkeypatch, threads, owner, name):
    """Appends the thread of each call of the function ``name`` of ``owner`` to ``threads``."""
    original = getattr(owner, name)

    def watched(*args, **named):
        threads.append(threading.current_thread())
        return original(*args, **named)

    monkeypatch.setattr(owner, name, watched)


@pytest.mark.parametrize("num_calls", [2, INLINE_MESSAGES])
def test_many_tool_calls_are_converted_in_another_thread(large_server, monkeypatch, num_calls):
    """A conversation of few messages may have many calls, which must not block the event loop."""
    threads = []
    watch(monkeypatch, threads, EarlierCall, "for_template")
    watch(monkeypatch, threads, prompts, "describe_tools")
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "tool_calls": [call] * num_calls},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    large_server.post("/tokenize", {"messages": messages})
    assert [thread is large_server._thread for thread in threads] == [num_calls == 2] * (num_calls + 1)


@pytest.mark.parametrize("num_parts", [2, INLINE_MESSAGES])
@pytest.mark.parametrize(
    ("module", "names", "path", "field", "kind"),
    [
        (messages, ["chat_request"], "/v1/messages", "messages", "text"),
        (messages, ["chat_request"], "/v1/messages/count_tokens", "messages", "text"),
        (responses, ["conversation", "chat_request", "input_items"], "/v1/responses", "input", "output_text"),
    ],
)
def test_many_blocks_are_converted_in_another_thread(
    large_server, monkeypatch, module, names, path, field, kind, num_parts
):
    threads = []
    for name in names:
        watch(monkeypatch, threads, module, name)
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant"}
    body = {field: [question, {**answer, "content": [{"type": kind, "text": ""}] * num_parts}, question]}
    limit = {"/v1/messages": {"max_tokens": 1}, "/v1/responses": {"max_output_tokens": 16}}.get(path, {})
    assert large_server.post(path, {**body, **limit}).status_code == 200
    assert [thread is large_server._thread for thread in threads] == [num_parts == 2] * len(names)


def call_bodies(values):
    """Returns a request with one tool call for each API with conversations. ``values`` are numbers in its arguments.

    The key of a request is its path.
    """
    arguments = json.dumps({"a": values})
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    use = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": values}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "2"}
    question = {"role": "user", "content": "Add."}
    return {
        "/tokenize": {
            "messages": [
                question,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "2", "tool_call_id": "1"},
            ]
        },
        "/v1/messages/count_tokens": {
            "messages": [question, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        },
        "/v1/responses": {
            "max_output_tokens": 16,
            "input": [
                question,
                {"type": "function_call", "call_id": "1", "name": "add", "arguments": arguments},
                {"type": "function_call_output", "call_id": "1", "output": "2"},
            ],
        },
    }


@pytest.mark.parametrize("num_values", [2, INLINE_CHAT_CHARS // 2])
@pytest.mark.parametrize(
    ("path", "functions"),
    [
        ("/tokenize", []),
        ("/v1/messages/count_tokens", [(messages, "chat_request")]),
        ("/v1/responses", [(responses, "conversation"), (responses, "chat_request")]),
    ],
)
def test_tool_calls_with_long_arguments_are_converted_in_another_thread(
    large_server, monkeypatch, path, functions, num_values
):
    threads = []
    for owner, name in [*functions, (EarlierCall, "for_template"), (prompts, "describe_tools")]:
        watch(monkeypatch, threads, owner, name)
    large_server.post(path, call_bodies([1] * num_values)[path])
    assert [thread is large_server._thread for thread in threads] == [num_values == 2] * (len(functions) + 2)


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/tokenize", "messages[1].tool_calls[0].function.arguments"),
        ("/v1/messages/count_tokens", "messages[1].content[0].input"),
        ("/v1/responses", "input[1].tool_calls[0].function.arguments"),
    ],
)
def test_a_tool_call_with_too_many_values_is_refused(large_server, path, param):
    answer = large_server.post(path, call_bodies([1] * MAX_ARGUMENT_VALUES)[path])
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert f"the maximum is {MAX_ARGUMENT_VALUES}" in error["message"]


def test_the_arguments_of_all_tool_calls_are_bounded_together(large_server):
    body = call_bodies([1] * (MAX_ARGUMENT_VALUES * 3 // 5))["/tokenize"]
    assert large_server.post("/tokenize", body).json()["error"]["param"] != "messages[1]"
    body["messages"][1]["tool_calls"] *= 2
    error = large_server.post("/tokenize", body).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "invalid_value")
    assert f"the maximum is {MAX_ARGUMENT_VALUES}" in error["message"]


def test_the_values_of_arguments_are_counted_before_they_are_parsed(large_server):
    body = call_bodies([])["/tokenize"]
    call = body["messages"][1]["tool_calls"][0]
    call["function"]["arguments"] = '{"a": [' + "1," * MAX_ARGUMENT_VALUES
    assert "the maximum is" in large_server.post("/tokenize", body).json()["error"]["message"]


@pytest.mark.parametrize("num_parts", [2, INLINE_MESSAGES])
@pytest.mark.parametrize(
    ("module", "path", "field", "kind", "image"),
    [
        (messages, "/v1/messages/count_tokens", "messages", "text",
         {"type": "image", "source": {"type": "url", "url": "http://host/a.png"}}),
        (responses, "/v1/responses", "input", "input_text", {"type": "input_image", "image_url": "http://host/a.png"}),
    ],
)  # fmt: skip
def test_errors_of_long_conversations_are_named_in_another_thread(
    large_server, monkeypatch, module, path, field, kind, image, num_parts
):
    threads = []
    watch(monkeypatch, threads, module, "image_fields")
    parts = [{"type": kind, "text": "a"}] * num_parts
    answer = large_server.post(path, {field: [{"role": "user", "content": [*parts, image]}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"{field}[0].content[{num_parts}]")
    assert [thread is large_server._thread for thread in threads] == [num_parts == 2]


MANY = 500


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": "a"}], **{f"a{i}": 1 for i in range(MANY)}}),
        (ChatRequest, {"messages": [{"role": "user", "content": "a", **{f"a{i}": 1 for i in range(MANY)}}]}),
        (CountRequest, {"messages": [{"role": "user", "content": [{"type": "text"}] * MANY}]}),
        (CountRequest, {"messages": [{"role": "user", "content": "a"}], "system": [{"type": "text"}] * MANY}),
        (CountRequest, {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text"}] * MANY}]}]}),
        (ResponsesRequest, {"input": [{"type": "function_call", "call_id": "1", "name": "a"}] * MANY}),
        (ResponsesRequest, {"input": [{"role": "user", "content": [{"type": "input_text"}] * MANY}]}),
        (ResponsesRequest, {"input": [{"type": "reasoning", "content": [{"type": "reasoning_text"}] * MANY}]}),
        (ResponsesRequest, {"input": "a", "include": [1] * MANY}),
        (ResponsesRequest, {"input": "a", "metadata": {f"a{i}": 1 for i in range(MANY)}}),
    ],
)  # fmt: skip
def test_a_body_with_many_wrong_parts_makes_one_error(model, body):
    """pydantic makes the errors in one call, in which no other thread runs."""
    with pytest.raises(ValidationError) as raised:
        model.model_validate(body)
    assert raised.value.error_count() == 1


def test_the_sizes_of_bodies_are_noted_to_return_their_memory(large_server, monkeypatch):
    sizes = []
    monkeypatch.setattr(large_server.app.state.large_bodies, "note", sizes.append)
    bodies = [json.dumps({"prompt": "a" * size}).encode() for size in (1000, 2 << 20)]
    for body in bodies:
        large_server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert sizes == [len(body) for body in bodies]


@pytest.mark.parametrize("size", [1000, 100_000])
def test_large_bodies_are_parsed_in_another_thread(large_server, monkeypatch, size):
    threads = []
    original = body_module._parse

    def parse(*args):
        threads.append(threading.current_thread())
        return original(*args)

    monkeypatch.setattr(body_module, "_parse", parse)
    large_server.post("/v1/completions", {"prompt": "a" * size})
    assert [thread is large_server._thread for thread in threads] == [size == 1000]


def test_the_memory_for_a_body_is_checked_without_writing_to_it():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    body_module._check_memory(32 << 20)
    # The difference is in KiB. The call checks that 640 MiB of memory are available, but must not touch this memory.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


@pytest.mark.parametrize(
    ("body", "phrase"),
    [
        (b'{"prompt": [' + b"1," * MAX_JSON_VALUES + b"1]}", f"values; the maximum is {MAX_JSON_VALUES}"),
        (b'{"prompt": [' + b'"",' * MAX_JSON_OBJECTS + b'""]}', f"strings; the maximum is {MAX_JSON_OBJECTS}"),
        (b'{"prompt": [' + b"[]," * MAX_JSON_OBJECTS + b"1]}", "objects and lists; the maximum is"),
    ],
    ids=["values", "strings", "lists"],
)
def test_bodies_with_too_many_parts_are_not_parsed(large_server, monkeypatch, body, phrase):
    monkeypatch.setattr(body_module.orjson, "loads", None)
    answer = large_server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert phrase in answer.json()["error"]["message"]


def test_the_bodies_of_all_requests_are_bounded_together(tokenizer):
    with running(FakeEngine(tokenizer), max_body_bytes_in_flight=100_000) as server:
        half = http_request("/v1/completions", b"", "Content-Length: 60000") + b" " * 59_000
        with server.raw(half) as first:
            wait_until(lambda: server.app.state.body_bytes >= 59_000)
            with server.raw(half) as second:
                status, headers, body = read_response(second)
            assert (status, headers["retry-after"], json.loads(body)["error"]["code"]) == (503, "1", "overloaded")
            first.sendall(b" " * 1000)
            assert read_response(first)[0] == 400
        wait_until(lambda: server.app.state.body_bytes == 0)
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200


def test_connections_are_limited(tokenizer):
    with running(FakeEngine(tokenizer), max_connections=2) as server:
        with server.raw(b""), server.raw(b""), server.raw(b"") as third:
            status, headers, _ = read_response(third)
            assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
            refused = server.metrics.registry.get_sample_value("llm_serving_connections_refused_total")
            # The metric is read from the registry. A request to /metrics needs a new connection, which may be refused
            # until the first two are closed.
            assert refused == 1.0
        wait_until(lambda: server.http.get("/health/live").status_code == 200)
        assert "llm_serving_connections_refused_total" in server.http.get("/metrics").text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"choice": ["a" * 1000] * 100}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": {"enum": [1] * 50_000}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"title": "a" * 100_000}}}, "structured_outputs.json"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"a" * 99_999: {}}}}},
         "response_format.json_schema.schema"),
    ],
)  # fmt: skip
def test_a_grammar_that_is_too_long_is_not_converted_to_text(large_server, monkeypatch, fields, param):
    monkeypatch.setattr(grammar, "json", None)
    monkeypatch.setattr(grammar, "re", None)
    answer = large_server.post("/v1/completions", {"prompt": "a", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_value")
    assert f"the maximum is {grammar.MAX_GRAMMAR_BYTES}" in error["message"]


@pytest.mark.parametrize("number", [1, 64])
def test_many_tokens_of_repeated_prompts_are_decoded_in_another_thread(large_server, monkeypatch, number):
    threads = []
    watch(monkeypatch, threads, prompts.Prompt, "as_text")
    body = {"prompt": [[300] * 64] * number, "max_tokens": 1, "echo": True}
    assert large_server.post("/v1/completions", body).status_code == 200
    assert [thread is large_server._thread for thread in threads] == [number == 1] * number


class Transport:
    """A transport whose peer does not read."""

    def __init__(self):
        self.aborted = threading.Event()

    def abort(self):
        self.aborted.set()


@pytest.mark.parametrize("resumes", [False, True])
def test_a_client_that_does_not_read_is_closed(monkeypatch, resumes):
    monkeypatch.setattr(http_protocol, "WRITE_TIMEOUT_S", 0.05)

    async def run():
        protocol = BoundedHttpProtocol.__new__(BoundedHttpProtocol)
        protocol.loop, protocol.transport = asyncio.get_running_loop(), Transport()
        protocol.flow, protocol.channel_user, protocol._write_timer = FlowControl(protocol.transport), None, None
        protocol.pause_writing()
        if resumes:
            protocol.resume_writing()
        await asyncio.sleep(0.2)
        return protocol.transport.aborted.is_set()

    assert asyncio.run(run()) is not resumes
