"""Joins neighbouring messages of the same role, because many chat templates require that roles alternate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, groupby
from typing import Any

from llm_serving.server.fields.images import as_parts, joined


def join_neighbours(messages: Iterable[dict[str, Any]], separators: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the messages of a chat, with neighbouring messages of the same role joined to one.

    ``separators`` maps each role that is joined to the text between the joined contents. Messages of other roles stay
    separate. The time is proportional to the length of the messages.
    """
    found: list[dict[str, Any]] = []
    for role, group in groupby(messages, key=lambda message: str(message["role"])):
        run = list(group)
        found += [_joined(run, separators[role])] if role in separators and len(run) > 1 else run
    return found


def _joined(run: list[dict[str, Any]], separator: str) -> dict[str, Any]:
    """Joins the contents, tool calls and reasoning of messages with the same role."""
    message = dict(run[0])
    message["content"] = joined(chain.from_iterable(as_parts(each["content"] or "") for each in run), separator)
    calls = [call for each in run for call in each.get("tool_calls", ())]
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    thoughts = "".join(each.get("reasoning_content", "") for each in run)
    if thoughts:
        message["reasoning_content"] = thoughts
    return message
