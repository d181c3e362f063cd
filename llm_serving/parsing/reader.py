"""The input and output of a parser: text that arrives in pieces, and the events that the parser derives from it.

A parser is a generator over a ``Reader``. It yields when it needs more text. Its decisions depend on the characters and
on the end of the text, never on the boundaries of the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import cache
from typing import TypeVar

from llm_serving.parsing.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning

T = TypeVar("T")
Steps = Generator[None, None, T]
Sink = Callable[[str], None]

SPACE = " \t\r\n"


class Reader:
    """Holds the text that the parser has not read yet, and the events that the parser's caller has not fetched yet."""

    __slots__ = ("_gap", "_has_reasoning", "_max_calls", "_num_read", "_reasoning_space", "_space", "_space_end",
                 "events", "is_closed", "num_calls", "record", "text")  # fmt: skip

    def __init__(self, max_calls: int | None = None) -> None:
        """``max_calls`` is the maximum number of calls in the events. Further calls are left out."""
        self.text = ""
        self.is_closed = False
        self.events: list[Event] = []
        self.num_calls = 0
        """Number of calls that have begun, including calls above ``max_calls``, which have no events."""
        self.record: list[str] | None = None
        """The text that was read since the start of a possible call. If it turns out to be no call, it becomes content.
        None while no text is recorded.
        """
        self._max_calls = max_calls
        self._num_read = 0
        """Number of characters of the answer that ``take`` has returned."""
        self._space = ""
        """White space that becomes content if more content follows. The white space ends at character ``_space_end`` of
        the answer.
        """
        self._space_end = 0
        self._reasoning_space = ""
        self._has_reasoning = False
        self._gap: str | None = None
        """White space that ``content`` removes before the next content: newlines after the reasoning, and all white
        space after a call.

        None while content is being read.
        """

    def take(self, count: int) -> str:
        """Reads and returns the next ``count`` characters."""
        taken, self.text = self.text[:count], self.text[count:]
        self._num_read += len(taken)
        if self.record is not None:
            self.record.append(taken)
        return taken

    def put_back(self, text: str) -> None:
        """Undoes the last call of ``take``, which must have returned ``text``."""
        self.text = text + self.text
        self._num_read -= len(text)
        if self.record:
            self.record.pop()

    def recorded(self) -> str:
        """Returns the recorded text and stops recording."""
        text, self.record = "".join(self.record or ()), None
        return text

    def content(self, text: str) -> None:
        """Adds ``text`` to the content. ``text`` must be the text that was read last.

        White space around tool calls and newlines after the reasoning are left out.
        """
        space, space_end, end = self._space, self._space_end, self._num_read
        is_next = space_end == end - len(text)
        text = space + text
        if self._gap is not None:
            text = text.lstrip(self._gap)
            if not text:
                self._space = ""
                return
            self._gap = None
        body = text.rstrip(SPACE)
        self._space, self._space_end = text[len(body) :], end
        if not body:
            return
        end -= len(self._space)
        if not is_next:  # between the white space and the text was a marker, which is not content
            if space:
                self._add(Content(space, space_end - len(space), space_end))
            body = body[len(space) :]
        self._add(Content(body, end - len(body), end))

    def reasoning(self, text: str) -> None:
        """Adds ``text`` to the reasoning. Newlines at the start and the end of the reasoning are left out."""
        text = self._reasoning_space + text
        if not self._has_reasoning:
            text = text.lstrip("\n")
            self._has_reasoning = bool(text)
        body = text.rstrip("\n")
        self._reasoning_space = text[len(body) :]
        if body:
            self._add(Reasoning(body))

    def end_reasoning(self) -> None:
        """Ends a part of the reasoning. Content or another part of the reasoning may follow.

        A newline separates two parts of the reasoning.
        """
        self._reasoning_space = "\n"
        self._gap = "\n"

    def begin_call(self, name: str) -> None:
        """Begins a tool call."""
        self._space = ""
        self._gap = SPACE
        self.record = None
        self.num_calls += 1
        if self._is_kept:
            self._add(CallBegin(self.num_calls - 1, name))

    def arguments(self, text: str) -> None:
        """Adds arguments to the newest call."""
        if text and self._is_kept:
            self._add(Arguments(self.num_calls - 1, text))

    def end_call(self) -> None:
        """Ends the newest call."""
        if self._is_kept:
            self._add(CallEnd(self.num_calls - 1))

    def finish(self) -> None:
        """Adds the white space at the end of the text, if the answer ends with content."""
        if self._space:
            self._add(Content(self._space, self._space_end - len(self._space), self._space_end))
            self._space = ""

    @property
    def _is_kept(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls

    def _add(self, event: Event) -> None:
        """Adds an event. If the event continues the text of the last event, both are joined into one event."""
        last = self.events[-1] if self.events else None
        if isinstance(event, Content) and isinstance(last, Content) and event.begin == last.end:
            self.events[-1] = Content(last.text + event.text, last.begin, event.end)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            self.events[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments) and event.index == last.index:
            self.events[-1] = Arguments(event.index, last.text + event.text)
        else:
            self.events.append(event)


def pass_until(reader: Reader, markers: tuple[str, ...], sink: Sink) -> Steps[str | None]:
    """Reads up to and including the first of ``markers``. Passes the text before the marker to ``sink``. Returns the
    marker, or None if the text has ended.

    No marker may begin with the text of another marker.
    """
    pattern = _pattern(markers)
    while True:
        text = reader.text
        match = pattern.search(text) if markers else None
        held = len(text) if reader.is_closed else _start_of_partial(text, markers)
        if match is not None and match.start() <= held:
            sink(reader.take(match.start()))
            return reader.take(len(match[0]))
        if held:
            sink(reader.take(held))
        if reader.is_closed:
            return None
        yield


def expect(reader: Reader, *texts: str) -> Steps[str | None]:
    """Reads one of ``texts`` if it comes next. Returns this text, or None if another text comes next."""
    while True:
        for text in texts:
            if reader.text.startswith(text):
                return reader.take(len(text))
        if reader.is_closed or not any(text.startswith(reader.text) for text in texts):
            return None
        yield


def expect_end(reader: Reader, *texts: str) -> Steps[str | None]:
    """Reads one of ``texts`` if it comes next. Returns this text, or None if another text comes next.

    If the output ends after the beginning of one of ``texts``, drops this beginning and returns None.
    """
    found = yield from expect(reader, *texts)
    if found is None and reader.is_closed and any(text.startswith(reader.text) for text in texts):
        reader.take(len(reader.text))
    return found


def skip(reader: Reader, chars: str = SPACE) -> Steps[str]:
    """Reads and returns the next characters while they are in ``chars``."""
    skipped = ""
    while True:
        rest = reader.text.lstrip(chars)
        skipped += reader.take(len(reader.text) - len(rest))
        if rest or reader.is_closed:
            return skipped
        yield


def peek(reader: Reader) -> Steps[str]:
    """Returns the next character without reading it, or an empty text at the end."""
    while not reader.text and not reader.is_closed:
        yield
    return reader.text[:1]


@cache
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def _start_of_partial(text: str, markers: tuple[str, ...]) -> int:
    """If ``text`` ends with the beginning of a marker, returns the position at which this beginning starts.

    Otherwise returns the length of ``text``.
    """
    longest = max(map(len, markers), default=1)
    for position in range(max(0, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[position:]) for marker in markers):
            return position
    return len(text)
