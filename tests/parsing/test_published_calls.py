"""Tests reading calls that other programs have written: OpenAI's and Mistral's libraries, and published chat templates.

``tests/golden/calls.json`` has their texts. A wrong marker in our formats fails here. The fixtures of the other tests
could not show it, because they are made from our formats.
"""

from __future__ import annotations

import ast
import json
import random
from pathlib import Path
from typing import Any

import pytest

from llm_serving.parsing.events import collect
from llm_serving.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from llm_serving.parsing.parser import OutputParser
from support.call_fixtures import OPTIONS
from tools.call_golden.cases import CASES

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden" / "calls.json").read_text("utf-8"))
BY_NAME = {case.name: case for case in CASES}
WITHOUT_SOURCE = {"mistral_named"}
"""Formats that no library and no published template of the sources writes."""


def read(format_name: str, *pieces: str) -> tuple[str, list[tuple[str, Any]]]:
    """Returns the content and the calls that the parser finds. All calls must be complete."""
    reasoning = REASONING_FORMATS["channels" if format_name == "gpt_oss" else "think"]
    parser = OutputParser(TOOL_FORMATS[format_name], reasoning, OPTIONS)
    events = [event for piece in pieces for event in parser.feed(piece)]
    answer = collect([*events, *parser.finish()])
    assert all(call.is_complete for call in answer.calls)
    return answer.content.strip(), [(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda one: f"{one['source'].rpartition('/')[2]}-{one['case']}")
def test_published_calls_are_read(golden: dict[str, Any]) -> None:
    name, text, case = golden["format"], golden["text"], BY_NAME[golden["case"]]
    assert read(name, text) == (case.content, list(case.calls))
    for place in range(1, len(text)):
        assert read(name, text[:place], text[place:]) == (case.content, list(case.calls)), place


def test_every_format_has_published_calls() -> None:
    found = {name: {one["case"] for one in GOLDEN if one["format"] == name} for name in TOOL_FORMATS}
    assert {name for name, cases in found.items() if not cases} == WITHOUT_SOURCE
    assert {name for name, cases in found.items() if "escapes" not in cases} == {*WITHOUT_SOURCE, "pythonic"}


def random_value(draw: random.Random, depth: int) -> Any:
    """Returns a value of JSON. Its texts have quotes, backslashes, brackets and characters of several sizes."""
    kind = draw.randrange(7 if depth else 5)
    if kind == 0:
        return draw.choice([True, False, None])
    if kind == 1:
        return draw.choice([0, -7, 12345678901234567890, 0.5, -1e-07, 1e300])
    if kind < 5:
        return "".join(draw.choice("ab'\"\\\n\t\0{}[](),=:#é北🙂\x7f\u2028") for _ in range(draw.randrange(8)))
    items = [random_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    return items if kind == 5 else {random_value_key(draw): item for item in items}


def random_value_key(draw: random.Random) -> str:
    return "".join(draw.choice("ab'\"\\ é") for _ in range(draw.randrange(4)))


def test_calls_that_python_itself_writes() -> None:
    """Python's ``ast.unparse`` writes the calls of the format ``pythonic``."""
    draw = random.Random(5)
    for _ in range(300):
        calls = [(draw.choice(["weather", "now"]), {f"k{i}": random_value(draw, 3) for i in range(draw.randrange(4))})
                 for _ in range(draw.randrange(1, 4))]  # fmt: skip
        nodes = [ast.Call(ast.Name(name), [], [ast.keyword(key, ast.parse(repr(value), mode="eval").body)
                                              for key, value in values.items()]) for name, values in calls]  # fmt: skip
        text = ast.unparse(ast.List([*nodes], ast.Load()))
        assert read("pythonic", text) == ("", calls), text
        assert read("pythonic", *text) == ("", calls), text
