"""Tests that the work of a request is limited before memory is allocated.

Long work must not block the event loop.
"""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from llm_serving.errors import RequestError
from llm_serving.server.batches.files import FileContent
from llm_serving.server.generation.work import check_beams, check_work
from llm_serving.server.http import json_pieces
from llm_serving.server.http.json_pieces import EncodedList, PiecesResponse, encode_in_pieces
from llm_serving.server.limits import INLINE_ITEMS, MAX_LOGPROB_ENTRIES
from llm_serving.server.openai import chat as openai_chat
from llm_serving.server.state import ServerSettings
from support.fake_engine import FakeEngine
from support.http_server import running

SMALL = ServerSettings(max_prompt_tokens=100, max_context=128, vocab_size=300, max_request_tokens=1000)


def test_the_error_shows_the_arithmetic():
    check_work(SMALL, [(50, 50)], 10)
    with pytest.raises(RequestError) as error:
        check_work(SMALL, [(50, 51)], 10)
    assert str(error.value) == (
        "The request may take 10 (n) x (50 prompt + 51 output tokens) = 1010 tokens; the maximum for one request is "
        "1000 (serving_config.max_request_tokens). Ask for fewer prompts, a smaller n or fewer output tokens."
    )
    assert (error.value.status, error.value.param, error.value.code) == (400, "n", "request_too_large")
    with pytest.raises(RequestError, match=r"2 \(n\) x \(400 prompt \+ 200 output tokens of 2 prompts toget"):
        check_work(SMALL, [(300, 100), (100, 100)], 2)


def test_the_default_is_64_whole_sequences():
    default = ServerSettings(max_prompt_tokens=100, max_context=128, vocab_size=300)
    check_work(default, [(28, 100)], 64)
    with pytest.raises(RequestError, match=r"= 8256 tokens; the maximum for one request is 8192"):
        check_work(default, [(29, 100)], 64)


def test_log_probabilities_are_bounded():
    large = ServerSettings(max_prompt_tokens=1 << 30, max_context=1 << 30, vocab_size=300)
    check_work(large, [(1, MAX_LOGPROB_ENTRIES // 32)], 4, 8)
    with pytest.raises(RequestError, match=r"65540 output tokens x 16 log-probabilities = 1048640 entries") as error:
        check_work(large, [(1, 65535), (1, 5)], 1, 16)
    assert error.value.param == "logprobs"


def test_the_resent_tokens_of_a_beam_search_are_bounded():
    check_beams(SMALL, [(50, 50)], 8, "beam_width")
    many = ServerSettings(max_prompt_tokens=10**5, max_context=10**5, vocab_size=300, max_request_tokens=10**5)
    with pytest.raises(RequestError, match=r"4 beams x \(2000 steps x \(1000 \+ 2000\)\) = 24000000 tokens") as error:
        check_beams(many, [(1000, 2000)], 4, "beam_width")
    assert error.value.param == "beam_width"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a"] * 200, "max_tokens": 100}),
        ("/v1/completions", {"prompt": [[5] * 90] * 100}),
        ("/v1/completions", {"prompt": [5] * 90, "n": 64, "max_tokens": 38, "stream": True}),
        ("/v1/completions", {"prompt": ["a"] * 16, "use_beam_search": True, "n": 8, "max_tokens": 90}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 64}),
    ],
)
def test_too_much_work_is_refused(tokenizer, path, body, record_property):
    with running(FakeEngine(tokenizer), max_request_tokens=8000) as server:
        answer = server.post(path, body)
        record_property("begun_sequences", f"{len(server.engine.submitted)} of 1")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request_too_large")
        assert "8000 (serving_config.max_request_tokens)" in answer.json()["error"]["message"]
        assert server.engine.submitted == []
        small = {**body, "n": None, "prompt": "a"} if "prompt" in body else {**body, "n": 1}
        assert server.post(path, small).is_success


def test_token_lists_are_refused_before_they_are_examined(server, record_property):
    for prompt in ([5] * 101, [[5], [5] * 101], [5.5] * 101):
        error = server.post("/v1/completions", {"prompt": prompt}).json()["error"]
        record_property("begun_sequences", f"{len(server.engine.submitted)} of 1")
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("The prompt has 101 tokens; the maximum is 100")


def test_lists_are_encoded_in_pieces():
    items = [{"a": i, "b": "\0,\\u0000"} for i in range(3 * json_pieces.ITEMS_PER_PIECE + 1)]
    content = {"x\0": EncodedList(iter(items)), "y": [EncodedList([]), "\0"], "z": EncodedList.of_encoded([b"1", b"2"])}
    pieces = encode_in_pieces(content)
    assert json.loads(b"".join(pieces)) == {"x\0": items, "y": [[], "\0"], "z": [1, 2]}
    assert max(map(len, pieces)) < 40 * json_pieces.ITEMS_PER_PIECE


@pytest.mark.parametrize("size", [0, 1, 700_000])
@pytest.mark.parametrize("kind", ["JSON", "file"])
def test_the_last_bytes_of_a_response_also_end_it(tmp_path: Path, kind: str, size: int) -> None:
    """Otherwise a client could have all bytes and send its next request before the response is complete.

    The connection refuses this request.
    """
    content, path, sent = b"x" * size, tmp_path / "file", []
    path.write_bytes(content)
    pieces = [content[at : at + 1000] for at in range(0, size, 1000)]
    response: Any = PiecesResponse(pieces, {}) if kind == "JSON" else FileContent(path, size)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(response({"type": "http"}, None, send))
    start, *bodies = sent
    assert dict(start["headers"])[b"content-length"] == str(size).encode()
    assert b"".join(each["body"] for each in bodies) == content
    assert [each["more_body"] for each in bodies] == [True] * (len(bodies) - 1) + [False]
    assert size == 0 or all(each["body"] for each in bodies)
    assert len(bodies) > size // 300_000


@pytest.mark.parametrize("length", [5, 60])
def test_many_log_probabilities_are_encoded_in_another_thread(server, engine, tokenizer, monkeypatch, length):
    threads = set()
    original = openai_chat.chat_entries

    def chat_entries(*args):
        threads.add(threading.current_thread())
        yield from original(*args)

    monkeypatch.setattr(openai_chat, "chat_entries", chat_entries)
    engine.script = lambda prompt, sampling: [300] * length
    body = {"messages": [{"role": "user", "content": "a"}], "n": 8, "logprobs": True, "top_logprobs": 20}
    answer = server.post("/v1/chat/completions", body)
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["x-request-id"] == answer.json()["id"]
    choices = answer.json()["choices"]
    assert [len(choice["logprobs"]["content"]) for choice in choices] == [length] * 8
    assert [len(entry["top_logprobs"]) for entry in choices[7]["logprobs"]["content"]] == [20] * length
    is_long = 8 * length * 22 > INLINE_ITEMS
    assert (server._thread not in threads) == is_long


def test_other_requests_are_served_while_many_sequences_are_opened(server, engine, monkeypatch):
    """While one request opens 64 sequences of 90 tokens, other tasks of the event loop run more than once."""
    turns = []
    opened = engine.open

    def open_and_note(*args, **kwargs):
        if not turns:
            turns.append(0)
            server._loop.call_soon(count)
        return opened(*args, **kwargs)

    def count():
        turns.append(len(engine.opened))
        if len(engine.opened) < 64:
            server._loop.call_soon(count)

    monkeypatch.setattr(engine, "open", open_and_note)
    assert server.post("/v1/completions", {"prompt": [5] * 90, "n": 64, "max_tokens": 2}).status_code == 200
    assert any(0 < number < 64 for number in turns)
