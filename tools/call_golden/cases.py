"""Answers with tool calls that other programs render, for ``tools/make_call_golden.py`` and its tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": {
        "type": "object", "properties": properties, "required": []}}}
    for name, properties in (
        ("weather", {"city": {"type": "string", "description": "A city."},
                     "days": {"type": "integer", "description": "A number."}}),
        ("search-2", {"query": {"type": "string", "description": "A text."}}),
        ("now", {}),
    )
]  # fmt: skip
"""The tools of the cases. ``call_fixtures.TYPES`` has the types of their parameters."""


@dataclass(frozen=True)
class Case:
    """An answer: content before the calls, and the calls with their arguments."""

    name: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    content: str = ""

    @property
    def is_parallel(self) -> bool:
        """True if the answer has several calls."""
        return len(self.calls) > 1

    def message(self, *, arguments_are_text: bool = False) -> dict[str, Any]:
        """Returns the answer as a message for a chat template."""
        calls = [
            {"id": f"abcDEF12{index}", "type": "function", "function": {
                "name": name, "arguments": json.dumps(values, ensure_ascii=False) if arguments_are_text else values}}
            for index, (name, values) in enumerate(self.calls)
        ]  # fmt: skip
        return {"role": "assistant", "content": self.content, "tool_calls": calls}


CASES = (
    Case("one call", (("weather", {"city": "Bern", "days": 3}),)),
    Case("no arguments", (("now", {}),)),
    Case("escapes", (("weather", {"city": 'a "b" \\ {c}]\n北京 🙂'}),)),
    Case("two calls", (("weather", {"city": "Rio"}), ("search-2", {"query": "x y"}))),
    Case("content before", (("now", {}),), "Let me look."),
)
