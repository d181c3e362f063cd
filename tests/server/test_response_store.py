"""Tests the bounds of the response store, and the items of responses.

1000 random answers in pieces equal the whole responses, and log-probabilities are encoded once.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import orjson
import pytest

from llm_serving.parsing.calls import CallOptions
from llm_serving.parsing.events import Content
from llm_serving.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from llm_serving.parsing.parser import OutputParser
from llm_serving.server.http import json_pieces
from llm_serving.server.http.json_pieces import encode_in_pieces
from llm_serving.server.responses import items
from llm_serving.server.responses.input_items import answer_items
from llm_serving.server.responses.items import ItemWriter
from llm_serving.server.responses.store import ResponseStore, StoredItem, StoredResponse

NUM_STREAMS = 1000
PARTS = ("Rain. ", "\n", "é\U0001f642", "<think>", "</think>", "a < b", "<tool_call>",
         '<tool_call>\n{"name": "weather", "arguments": {"city": "B\\"\\u00e4", "n": [1, {"a": null}]}}\n</tool_call>',
         '<tool_call>{"name": "now", "arguments": {}}</tool_call>')  # fmt: skip


def entry(size: int) -> StoredResponse:
    return StoredResponse((b"x" * (size - 600), b"x" * 88), b"", (), ())


def test_a_tenant_keeps_its_newest_responses() -> None:
    store = ResponseStore(3, 10_000, 100_000)
    for i in range(5):
        assert store.put("a", f"{i}", entry(1000))
    assert [store.get("a", f"{i}") is not None for i in range(5)] == [False, False, True, True, True]
    assert store.get("b", "4") is None
    assert not store.delete("b", "4")
    assert store.put("a", "large", entry(9000))
    assert [store.get("a", name) is not None for name in ("3", "4", "large")] == [False, True, True]
    assert not store.put("a", "too large", entry(10_001))
    assert store.num_bytes == 10_000
    assert store.delete("a", "large")
    assert store.delete("a", "4")
    assert store.num_bytes == 0


def test_the_tenant_with_the_most_bytes_gives_way() -> None:
    store = ResponseStore(100, 10_000, 15_000)
    store.put("small", "first", entry(1000))
    for i in range(10):
        store.put("large", f"{i}", entry(1000))
    for i in range(200):
        store.put(f"tenant {i}", "one", entry(600))
        assert store.num_bytes <= 15_000
    assert store.get("small", "first") is None or store.get("large", "0") is None
    assert store.get("large", "0") is None


def parser() -> OutputParser:
    return OutputParser(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"], CallOptions({"weather": {}, "now": {}}))


def writer() -> ItemWriter:
    numbers = itertools.count()
    return ItemWriter("resp-1", lambda: f"call_{next(numbers)}")


def test_random_streams_equal_the_whole() -> None:
    chance = random.Random(27)
    kinds = set()
    for _ in range(NUM_STREAMS):
        text = "".join(chance.choices(PARTS, k=chance.randint(1, 8)))
        text = text[: chance.randint(1, len(text))] if chance.random() < 0.3 else text
        reader, whole = parser(), writer()
        whole.write([*reader.feed(text), *reader.finish()])
        whole.end()
        reader, pieces, rest = parser(), writer(), text
        events: list[dict[str, Any]] = []
        while rest:
            size = chance.randint(1, 12)
            events += pieces.write(reader.feed(rest[:size]))
            rest = rest[size:]
        events += pieces.write(reader.finish())
        events += pieces.end()
        assert pieces.items == whole.items, text
        texts = [""] * len(whole.items)
        for event in events:
            if event["type"].endswith(".delta"):
                texts[event["output_index"]] += event["delta"]
        stated = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in whole.items]
        assert texts == stated, text
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == whole.items
        kinds |= {item["type"] for item in whole.items}
    assert kinds == {"message", "reasoning", "function_call"}


def test_items_count_with_their_bytes() -> None:
    item = StoredItem.of({"id": "msg_1", "text": "x" * 1000})
    empty = StoredResponse((), b"", (), ())
    assert StoredResponse((), b"", (item,), (item,)).size >= empty.size + 2 * len(item.json) > empty.size + 2000


def test_stored_answers_have_no_log_probabilities() -> None:
    part = {"type": "output_text", "text": "Rain.", "annotations": []}
    message = {"id": "msg_1", "type": "message", "content": [part | {"logprobs": [{"token": "Rain."}]}]}
    call = {"id": "fc_1", "type": "function_call", "arguments": "{}"}
    kept = [json.loads(item.json) for item in answer_items([message, call])]
    assert kept == [message | {"content": [part | {"logprobs": []}]}, call]


class OneLogprob:
    """Log-probabilities of an answer with one token for each character."""

    def take(self, begin: int, end: int) -> list[dict[str, Any]]:
        token: dict[str, Any] = {"token": "a", "logprob": -0.5, "bytes": [97]}
        return [{**token, "top_logprobs": [token]} for _ in range(begin, end)]


def encoded(content: object) -> Any:
    return orjson.loads(b"".join(encode_in_pieces(content)))


def test_log_probabilities_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last events repeat all log-probabilities. To make them again would block the event loop for 100 ms."""
    converted = []
    original = items.without_bytes

    def watched(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        converted.append(len(entries))
        return original(entries)

    monkeypatch.setattr(items, "without_bytes", watched)
    writer = ItemWriter("resp-1", str, OneLogprob())  # type: ignore[arg-type]
    deltas = [writer.write([Content("aa", 2 * i, 2 * i + 2)])[-1] for i in range(3)]
    text, part, item = encoded(writer.end())
    assert converted == [2, 2, 2]
    short = {"token": "a", "logprob": -0.5}
    assert encoded(deltas[2])["logprobs"] == [{**short, "top_logprobs": [short]}] * 2
    assert text["logprobs"] == [{**short, "top_logprobs": [short]}] * 6
    assert part["part"]["logprobs"] == item["item"]["content"][0]["logprobs"] == OneLogprob().take(0, 6)


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_log_probabilities_are_never_in_one_text(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """One call of the encoder for all log-probabilities of a long answer would block the event loop."""
    count, converted, at_end = 1000, [], []
    original = items.without_bytes
    monkeypatch.setattr(items, "without_bytes", lambda group: converted.append(len(group)) or original(group))
    writer = ItemWriter("resp-1", str, OneLogprob())  # type: ignore[arg-type]
    for begin in range(0, count, step):
        size = min(step, count - begin)
        [*_, delta] = writer.write([Content("a" * size, begin, begin + size)])
        assert len(encoded(delta)["logprobs"]) == size
    assert max(converted) == min(step, json_pieces.ITEMS_PER_PIECE)
    assert sum(converted) == count
    for event in writer.end():
        at_end.append(encode_in_pieces(event))
        assert max(map(len, at_end[-1])) < 2 * json_pieces.PIECE_BYTES
    text, part, item = (orjson.loads(b"".join(pieces)) for pieces in at_end)
    assert len(text["logprobs"]) == count
    assert part["part"]["logprobs"] == item["item"]["content"][0]["logprobs"] == OneLogprob().take(0, count)
    # The pieces are few, and the last events have the same objects.
    assert len(at_end[1]) < sum(map(len, at_end[1])) // json_pieces.PIECE_BYTES + 5
    assert [a is b for a, b in zip(at_end[1][2:-3], at_end[2][2:-3], strict=True)] == [True] * (len(at_end[1]) - 5)


def test_a_growing_list_equals_its_items() -> None:
    growing = json_pieces.GrowingList()
    assert encode_in_pieces(growing.encoded()) == [b"[]"]
    numbers = list(range(20_000))
    for begin in range(0, len(numbers), 7):
        growing.add(orjson.dumps(numbers[begin : begin + 7])[1:-1])
        assert begin > 70 or encoded(growing.encoded()) == numbers[: begin + 7]
    assert encoded(growing.encoded()) == numbers
    longest = max(map(len, encode_in_pieces(growing.encoded())))
    assert json_pieces.PIECE_BYTES <= longest < json_pieces.PIECE_BYTES + 100
