"""Tests log-probabilities of ``/v1/responses`` with OpenAI's own client. Only the tokens of the message have them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from llm_serving.engine.chat_template import ChatTemplate
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.server.http.json_pieces import PIECE_BYTES, SEND_BYTES
from llm_serving.server.http.protocol import StreamChannel
from llm_serving.server.responses import answer
from support.fake_engine import MODEL_NAME, FakeEngine
from support.http_server import HttpServer, running
from support.lazy_module import LazyModule
from support.time_limits import time_limit

openai = LazyModule("openai")

CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TOOLS: list[Any] = [{"type": "function", "name": "now"}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<|assistant|>"
THINKING = TEMPLATE + "{% if false %}<think></think>{% endif %}"
LOGPROBS = ["message.output_text.logprobs"]


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[HttpServer]:
    with running(FakeEngine(tokenizer), max_context=4096, max_prompt_tokens=4000) as server:
        yield server


@pytest.fixture
def server(shared: HttpServer, monkeypatch: pytest.MonkeyPatch) -> HttpServer:
    shared.engine.reset()
    shared.engine.max_model_len = 4096
    monkeypatch.setattr(shared.engine.tokenizer, "chat_template", ChatTemplate(THINKING, {}))
    return shared


@pytest.fixture
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=time_limit(10)) as client:
        yield client


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.responses.create(model=MODEL_NAME, input="Weather?", include=LOGPROBS, **more)


def entries_of(response: Any) -> list[Any]:
    [message] = [item for item in response.output if item.type == "message"]
    return list(message.content[0].logprobs)


def text_of(entries: list[Any]) -> str:
    return b"".join(bytes(entry.bytes) for entry in entries).decode()


def test_log_probabilities_equal_those_of_a_chat(client: openai.OpenAI, server: HttpServer) -> None:
    server.engine.say("It rains in Züri 🙂.")
    messages: Any = [{"role": "user", "content": "Weather?"}]
    chat = client.chat.completions.create(
        model=MODEL_NAME, messages=messages, logprobs=True, top_logprobs=3, max_tokens=9
    )
    response = ask(client, top_logprobs=3, max_output_tokens=9)
    expected = [one.to_dict() for one in chat.choices[0].logprobs.content]
    assert [one.to_dict() for one in entries_of(response)] == expected
    assert len(entries_of(response)) == 9
    assert [len(entry.top_logprobs) for entry in entries_of(ask(client))][:2] == [0, 0]


def test_without_the_wish_there_are_none(client: openai.OpenAI, server: HttpServer) -> None:
    response = client.responses.create(model=MODEL_NAME, input="Weather?")
    assert entries_of(response) == []
    assert not server.engine.submitted[-1].sampling.wants_logits


@pytest.mark.parametrize("pieces", [1, 3, 100])
@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("<think>\nIt rains. 🙂\n</think>\n\nIt rains. 🙂", "It rains. 🙂"),
        (f"<think>Hm.</think>I look.\n{CALL}", "I look."),
        (f"I look. 🙂 \n{CALL}\n{CALL}", "I look. 🙂"),
        ("a <tool> b < c", "a <tool> b < c"),
    ],
)
def test_only_the_message_has_log_probabilities(
    client: openai.OpenAI, server: HttpServer, said: str, shown: str, pieces: int
) -> None:
    server.engine.say(said)
    server.engine.tokens_per_piece = pieces
    whole = ask(client, tools=TOOLS, top_logprobs=1)
    entries = entries_of(whole)
    # A token at an edge may also have characters that do not belong to the message.
    assert shown in text_of(entries)
    assert len(text_of(entries)) <= len(shown) + 4
    assert [entry.logprob for entry in entries] == [-0.5] * len(entries)
    with client.responses.stream(
        model=MODEL_NAME, input="Weather?", include=LOGPROBS, tools=TOOLS, top_logprobs=1
    ) as events:
        found = list(events)
        streamed = events.get_final_response()
    assert [one.to_dict() for one in entries_of(streamed)] == [one.to_dict() for one in entries]
    deltas = [event for event in found if event.type == "response.output_text.delta"]
    parts = [entry.to_dict() for event in deltas for entry in event.logprobs]
    [done] = [event for event in found if event.type == "response.output_text.done"]
    assert parts == [entry.to_dict() for entry in done.logprobs]
    assert [part["token"] for part in parts] == [entry.token for entry in entries]
    assert all("bytes" not in part and "bytes" not in part["top_logprobs"][0] for part in parts)


@pytest.fixture
def long_body(server: HttpServer) -> dict[str, Any]:
    server.engine.script = lambda prompt, sampling: [300] * 200
    return {"input": "a", "include": LOGPROBS, "top_logprobs": 20, "max_output_tokens": 200}


def test_the_end_of_a_long_stream_is_written_in_parts(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, long_body: dict[str, Any]
) -> None:
    """One write of all log-probabilities would block the event loop. The stored response is the one of the stream."""
    writes: list[int] = []
    original = StreamChannel._write

    def write(channel: StreamChannel, head: bytes, body: bytes, is_last: bool) -> None:
        writes.append(len(body))
        original(channel, head, body, is_last)

    monkeypatch.setattr(StreamChannel, "_write", write)
    with server.http.stream("POST", "/v1/responses", json={**long_body, "stream": True}) as reply:
        lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text, part, item, completed = events[-4:]
    assert completed["type"] == "response.incomplete"
    [message] = completed["response"]["output"]
    full = message["content"][0]["logprobs"]
    assert [len(text["logprobs"]), len(full)] == [200, 200]
    assert [len(entry["top_logprobs"]) for entry in full] == [20] * 200
    assert part["part"]["logprobs"] == item["item"]["content"][0]["logprobs"] == full
    assert len(lines[-4]) + len(lines[-3]) + len(lines[-2]) + len(lines[-1]) > 4 * SEND_BYTES
    assert SEND_BYTES <= max(writes) < SEND_BYTES + 2 * PIECE_BYTES
    stored = server.http.get(f"/v1/responses/{completed['response']['id']}")
    assert stored.json() == completed["response"]
    assert stored.headers["content-length"] == str(len(stored.content))


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_too_large_for_the_store_is_not_encoded_for_it(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, long_body: dict[str, Any], stream: bool
) -> None:
    monkeypatch.setattr(server.app.state.responses, "_max_tenant_bytes", 100_000)
    monkeypatch.setattr(answer, "answer_message", None)
    monkeypatch.setattr(answer, "answer_items", None)
    if stream:
        with server.http.stream("POST", "/v1/responses", json={**long_body, "stream": True}) as reply:
            *_, last = [line for line in reply.iter_lines() if line.startswith("data: ")]
        response = json.loads(last.removeprefix("data: "))["response"]
    else:
        response = server.post("/v1/responses", long_body).json()
    assert response["store"] is False
    assert len(response["output"][0]["content"][0]["logprobs"]) == 200
    assert server.http.get(f"/v1/responses/{response['id']}").status_code == 404
