"""Turns the events of a parser into content blocks of Anthropic's API, whole or as events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pydantic_core import from_json

from llm_serving.parsing.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning


class BlockWriter:
    """Writes the events of content blocks. Each block begins, has deltas, and ends before the next block begins."""

    def __init__(self, call_id: Callable[[], str]) -> None:
        self._call_id = call_id
        self._next = 0
        self._kind: str | None = None

    def write(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """Returns the events of Anthropic's stream for the next events of the parser."""
        found: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, Content | Reasoning):
                kind = "text" if isinstance(event, Content) else "thinking"
                if event.text:
                    found += self._open(kind, _EMPTY[kind])
                    found.append(self._delta({"type": f"{kind}_delta", kind: event.text}))
            elif isinstance(event, CallBegin):
                found += self.end()
                found += self._open(
                    "tool_use", {"type": "tool_use", "id": self._call_id(), "name": event.name, "input": {}}
                )
            elif isinstance(event, Arguments):
                if event.text:
                    found.append(self._delta({"type": "input_json_delta", "partial_json": event.text}))
            else:
                assert isinstance(event, CallEnd)
                found += self.end()
        return found

    def end(self) -> list[dict[str, Any]]:
        """Returns the event that ends the open block. Empty if no block is open."""
        if self._kind is None:
            return []
        self._kind = None
        return [{"type": "content_block_stop", "index": self._next - 1}]

    def _open(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        if self._kind == kind:
            return []
        ended = self.end()
        self._kind = kind
        self._next += 1
        return [*ended, {"type": "content_block_start", "index": self._next - 1, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._next - 1, "delta": delta}


_EMPTY: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


def blocks_of(events: Iterable[Event], call_id: Callable[[], str]) -> list[dict[str, Any]]:
    """Returns the content blocks of a complete answer."""
    writer, blocks, texts = BlockWriter(call_id), [], []
    for event in writer.write(events):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            texts.append([""])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[-1].append(next(value for name, value in delta.items() if name != "type"))
    for block, parts in zip(blocks, texts, strict=True):
        text = "".join(parts)
        if block["type"] == "tool_use":
            block["input"] = input_of(text)
        else:
            block[block["type"]] = text
    return blocks


INVALID = "_invalid_json"
"""Name of the only member in a tool call's ``input``, if the arguments that the model wrote are not a JSON object. Its
value is the text of the arguments.
"""


def input_of(text: str) -> dict[str, Any]:
    """Returns the input of a tool call, which the model wrote as the JSON object ``text``.

    If ``max_tokens`` has cut the text, the input has only the complete members. Anthropic's clients do the same.
    """
    if not text.strip():
        return {}
    try:
        value = from_json(text, allow_partial=True)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {INVALID: text}
