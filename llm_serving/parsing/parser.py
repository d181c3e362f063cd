"""Reads the output text of one sequence, piece by piece, and returns the events of reasoning, content and tool calls.
"""

from __future__ import annotations

from llm_serving.parsing.calls import CallOptions, harmony, plain
from llm_serving.parsing.events import Event
from llm_serving.parsing.formats import ReasoningFormat, ToolFormat
from llm_serving.parsing.reader import Reader, Steps, expect, pass_until, skip


class OutputParser:
    """The parser of one sequence's output.

    The parts of the answer do not depend on how the text is split into pieces.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None = None,
        options: CallOptions | None = None,
        *,
        is_thinking: bool = False,
        max_calls: int | None = None,
    ) -> None:
        """``is_thinking`` is True if the prompt ends within the reasoning.

        If ``tools`` is None, calls stay in the content.
        """
        options = options or CallOptions()
        self._reader = Reader(max_calls)
        # The generator refers to the reader and not to this object. So there is no reference cycle that delays freeing.
        self._steps = _steps(self._reader, tools, reasoning, options, is_thinking)
        self._is_at_end = False
        self._advance()

    @property
    def has_calls(self) -> bool:
        """True if a tool call has begun."""
        return self._reader.num_calls > 0

    def feed(self, text: str) -> list[Event]:
        """Reads the next piece of the text. Returns the new events."""
        if text:
            self._reader.text += text
            self._advance()
        return self._taken()

    def finish(self) -> list[Event]:
        """Ends the text. Returns the last events."""
        self._reader.is_closed = True
        self._advance()
        self._reader.finish()
        return self._taken()

    def _advance(self) -> None:
        if not self._is_at_end:
            self._is_at_end = next(self._steps, self) is self

    def _taken(self) -> list[Event]:
        events, self._reader.events = self._reader.events, []
        return events


def _steps(
    reader: Reader, tools: ToolFormat | None, reasoning: ReasoningFormat | None, options: CallOptions, is_thinking: bool
) -> Steps[None]:
    if reasoning is not None and reasoning.is_in_channels:
        yield from harmony(reader, options)
        return
    if reasoning is not None:
        yield from _read_reasoning(reader, reasoning, is_thinking)
    yield from (plain if tools is None else tools.parse)(reader, options)


def _read_reasoning(reader: Reader, reasoning: ReasoningFormat, is_thinking: bool) -> Steps[None]:
    """Reads the reasoning at the start of the text. Without reasoning, reads only white space, which becomes content.
    """
    reader.record = []
    yield from skip(reader)
    opened = yield from expect(reader, reasoning.open)
    skipped = reader.recorded()
    if opened is None and not is_thinking:
        reader.content(skipped)
        return
    if opened is None:
        reader.reasoning(skipped)
    yield from pass_until(reader, (reasoning.close,), reader.reasoning)
    reader.end_reasoning()
