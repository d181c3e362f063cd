"""Tests that the joined events of a stream equal the whole message, for 1000 random answers in random pieces."""

from __future__ import annotations

import itertools
import random
from typing import Any

from llm_serving.parsing.calls import CallOptions
from llm_serving.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from llm_serving.parsing.parser import OutputParser
from llm_serving.server.messages.blocks import INVALID, BlockWriter, blocks_of, input_of

NUM_STREAMS = 1000
PARTS = ("Rain. ", "\n", "é\U0001f642", "<think>", "</think>", "a < b", "<tool_call>",
         '<tool_call>\n{"name": "weather", "arguments": {"city": "B\\"\\u00e4", "n": [1, {"a": null}]}}\n</tool_call>',
         '<tool_call>{"name": "now", "arguments": {}}</tool_call>')  # fmt: skip


def parser() -> OutputParser:
    return OutputParser(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"], CallOptions({"weather": {}, "now": {}}))


def ids() -> Any:
    numbers = itertools.count()
    return lambda: f"toolu_{next(numbers)}"


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Collects blocks as a client does, and checks the order of the events."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    texts: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            texts.append("")
            is_open = True
            continue
        assert is_open
        assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            continue
        delta = event["delta"]
        name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}[delta["type"]]
        assert delta[name]
        texts[-1] += delta[name]
    assert not is_open
    for block, text in zip(blocks, texts, strict=True):
        name = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
        block[name] = input_of(text) if name == "input" else text
    return blocks


def test_random_streams_equal_the_whole() -> None:
    chance = random.Random(27)
    kinds = set()
    for _ in range(NUM_STREAMS):
        text = "".join(chance.choices(PARTS, k=chance.randint(1, 8)))
        text = text[: chance.randint(1, len(text))] if chance.random() < 0.3 else text
        reader = parser()
        whole = blocks_of([*reader.feed(text), *reader.finish()], ids())
        reader, writer, events, rest = parser(), BlockWriter(ids()), [], text
        while rest:
            size = chance.randint(1, 12)
            events += writer.write(reader.feed(rest[:size]))
            rest = rest[size:]
        events += writer.write(reader.finish())
        events += writer.end()
        assert joined(events) == whole, text
        kinds |= {block["type"] for block in whole}
    assert kinds == {"text", "thinking", "tool_use"}


def test_inputs() -> None:
    assert input_of("") == {}
    assert input_of('{"a": 1}') == {"a": 1}
    assert input_of('{"a": 1, "b": [2') == {"a": 1, "b": [2]}
    assert input_of('{"a": oops}') == {INVALID: '{"a": oops}'}
    assert input_of("[1]") == {INVALID: "[1]"}
