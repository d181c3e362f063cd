"""The events of a parser: parts of an answer, in the order in which the model writes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """The next part of the content, which is the text for the user."""

    text: str
    begin: int = field(default=0, compare=False)
    """Position of the part in the text of the answer, in characters. The part is ``answer[begin:end]``."""
    end: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next part of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins. ``index`` is its number in the answer, from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of the arguments of call ``index``, as the model has written it. All parts together are JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments of call ``index`` are complete."""

    index: int


Event = Content | Reasoning | CallBegin | Arguments | CallEnd


@dataclass(slots=True)
class ToolCall:
    """One complete tool call. ``arguments`` is the JSON text that the model has written."""

    name: str
    arguments: str = ""
    is_complete: bool = False


@dataclass(slots=True)
class ParsedAnswer:
    """A complete answer: content, reasoning and tool calls."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def collect(events: Iterable[Event]) -> ParsedAnswer:
    """Returns the complete answer that consists of these events."""
    answer = ParsedAnswer()
    contents, reasonings, slices = [], [], []
    for event in events:
        if isinstance(event, Content):
            contents.append(event.text)
        elif isinstance(event, Reasoning):
            reasonings.append(event.text)
        elif isinstance(event, CallBegin):
            answer.calls.append(ToolCall(event.name))
            slices.append([""])
        elif isinstance(event, Arguments):
            slices[event.index].append(event.text)
        else:
            answer.calls[event.index].is_complete = True
    answer.content, answer.reasoning = "".join(contents), "".join(reasonings)
    for call, parts in zip(answer.calls, slices, strict=True):
        call.arguments = "".join(parts)
    return answer
