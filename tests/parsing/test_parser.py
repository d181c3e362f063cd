"""Tests that the parser of answers finds the same parts, however the text is split into pieces."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from llm_serving.parsing.events import Arguments, Content, Event, ParsedAnswer, collect
from llm_serving.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from llm_serving.parsing.parser import OutputParser
from support.call_fixtures import OPTIONS, Fixture, fixtures_of


def parser_of(format_name: str, fixture: Fixture) -> OutputParser:
    tools = TOOL_FORMATS[format_name]
    reasoning = REASONING_FORMATS["channels" if format_name == "gpt_oss" else "think"]
    return OutputParser(tools, reasoning, OPTIONS, is_thinking=fixture.is_thinking)


def events_of(parser: OutputParser, *pieces: str) -> list[Event]:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def parsed(answer: ParsedAnswer) -> tuple[object, ...]:
    """Returns the parts of an answer, with complete arguments as values."""
    calls = [(c.name, json.loads(c.arguments) if c.is_complete else c.arguments, c.is_complete) for c in answer.calls]
    return answer.content, answer.reasoning, calls


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_parts_are_right_for_every_split(name: str) -> None:
    for fixture in fixtures_of(name):
        text, case = fixture.text, fixture.name
        whole = collect(events_of(parser_of(name, fixture), text))
        assert parsed(whole) == parsed(fixture.answer), case
        if TOOL_FORMATS[name].arguments == "json":
            assert whole == fixture.answer, f"{case}: the arguments are raw slices of the text"
        for place in range(1, len(text)):
            pieces = text[:place], text[place:]
            assert collect(events_of(parser_of(name, fixture), *pieces)) == whole, f"{case}: split at {place}"
        assert collect(events_of(parser_of(name, fixture), *text)) == whole, f"{case}: one character at a time"


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_each_part_of_the_content_states_its_place_in_the_text(name: str) -> None:
    num_parts = 0
    for fixture in fixtures_of(name):
        for pieces in ([fixture.text], list(fixture.text)):
            parts = [event for event in events_of(parser_of(name, fixture), *pieces) if isinstance(event, Content)]
            assert [fixture.text[part.begin : part.end] for part in parts] == [part.text for part in parts]
            assert all(first.end <= second.begin for first, second in pairwise(parts))
            num_parts += len(parts)
    assert num_parts > 30


def test_each_format_has_thirty_fixtures() -> None:
    assert {name: len(fixtures_of(name)) for name in TOOL_FORMATS if len(fixtures_of(name)) < 30} == {}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_arguments_are_streamed_before_the_call_is_complete(name: str) -> None:
    fixture = next(one for one in fixtures_of(name) if one.name == "escapes")
    parser = parser_of(name, fixture)
    slices = [event for char in fixture.text for event in parser.feed(char) if isinstance(event, Arguments)]
    assert len(slices) > 10


def test_calls_after_the_maximum_are_left_out() -> None:
    text = "".join(f'<tool_call>{{"name": "now", "arguments": {{"i": {i}}}}}</tool_call>' for i in range(3)) + " end"
    answer = collect(events_of(OutputParser(TOOL_FORMATS["hermes"], max_calls=1), text))
    assert (answer.content, [call.arguments for call in answer.calls]) == ("end", ['{"i": 0}'])


def test_without_tools_calls_are_content() -> None:
    text = '<think>a</think>\n<tool_call>{"name": "now"}</tool_call> '
    answer = collect(events_of(OutputParser(None, REASONING_FORMATS["think"]), text))
    assert (answer.content, answer.reasoning, answer.calls) == ('<tool_call>{"name": "now"}</tool_call> ', "a", [])


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("a\n</think>\n\nb", "b", "a"),
        ("\n\na\n\nb", "", "a\n\nb"),
        ("</think>b", "b", ""),
        ("<think>a</think>b</think>", "b</think>", "a"),
        ("a</thin", "", "a</thin"),
    ],
)
def test_reasoning_that_the_prompt_has_opened(text: str, content: str, reasoning: str) -> None:
    for place in range(len(text)):
        parser = OutputParser(None, REASONING_FORMATS["think"], is_thinking=True)
        answer = collect(events_of(parser, text[:place], text[place:]))
        assert (answer.content, answer.reasoning) == (content, reasoning)


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", ">",
    "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "```json",
    "```", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "assistant",
    "commentary to=functions.now", "analysis", "final", "<think>", "</think>", "{", "}", "[", "]",
    '"', "\\", ":", ",", ";", " ", "\n", "name", '"name"', '"now"', '"arguments"', '{"name": "now"',
    "now(", "[weather(", "city=", "(", ")", "=", "'", "\\u12", "now", "weather",
    "days", "city", "1", "null", "true", "é", "\U0001f642", "<", "x",
]  # fmt: skip


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_random_texts_are_read_alike_for_every_split(name: str) -> None:
    draw = random.Random(name)
    for number in range(400):
        text = "".join(draw.choice(FRAGMENTS) for _ in range(draw.randrange(1, 30)))
        reasoning = REASONING_FORMATS["channels" if name == "gpt_oss" else "think"] if number % 2 else None
        max_calls = draw.choice([None, 1])

        def events(*pieces: str, reasoning: Any = reasoning, max_calls: int | None = max_calls) -> ParsedAnswer:
            parser = OutputParser(TOOL_FORMATS[name], reasoning, OPTIONS, max_calls=max_calls)
            return collect(events_of(parser, *pieces))

        whole = events(text)
        assert events(*text) == whole, text
        places = sorted(draw.sample(range(len(text) + 1), min(3, len(text))))
        assert events(*(text[i:j] for i, j in pairwise([0, *places, len(text)]))) == whole, text
