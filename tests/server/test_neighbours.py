"""Tests that neighbouring messages of a role become one message, with work that is proportional to their length."""

from __future__ import annotations

import random
from typing import Any

import pytest

from llm_serving.server.fields import neighbours
from llm_serving.server.fields.images import as_parts, image_part, joined, text_part
from llm_serving.server.fields.neighbours import join_neighbours

SEPARATORS = {"user": "\n", "assistant": ""}


def one_by_one(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins each message to the one before."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if not found or found[-1]["role"] != message["role"] or message["role"] not in SEPARATORS:
            found.append(dict(message))
            continue
        last = found[-1]
        parts = [*as_parts(last["content"] or ""), *as_parts(message["content"] or "")]
        last["content"] = joined(parts, SEPARATORS[message["role"]])
        if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
            last |= {"tool_calls": calls, "content": last["content"] or None}
        if thoughts := last.get("reasoning_content", "") + message.get("reasoning_content", ""):
            last["reasoning_content"] = thoughts
    return found


def message_of(rng: random.Random) -> dict[str, Any]:
    role = rng.choice(["system", "user", "user", "assistant", "assistant", "tool"])
    message: dict[str, Any] = {"role": role, "content": rng.choice(["", "a", "b\n"])}
    if role == "user" and rng.random() < 0.3:
        message["content"] = [text_part("c"), image_part("data:"), text_part("d")]
    if role == "assistant" and rng.random() < 0.3:
        message |= {"content": rng.choice([None, "e"]), "tool_calls": [{"id": rng.random()}]}
    if role == "assistant" and rng.random() < 0.3:
        message["reasoning_content"] = "f"
    return message


@pytest.mark.parametrize("seed", range(20))
def test_messages_are_joined_as_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    messages = [message_of(rng) for _ in range(40)]
    assert join_neighbours(messages, SEPARATORS) == one_by_one(messages)


def test_the_texts_of_many_messages_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To join them one by one would copy the first text as often as there are messages."""
    calls = []

    def counted(parts: Any, between: str) -> Any:
        calls.append(between)
        return joined(parts, between)

    monkeypatch.setattr(neighbours, "joined", counted)
    messages = [{"role": "assistant", "content": "text"}] * 1000 + [{"role": "user", "content": "text"}] * 1000
    assert [len(each["content"]) for each in join_neighbours(messages, SEPARATORS)] == [4000, 4999]
    assert calls == ["", "\n"]
