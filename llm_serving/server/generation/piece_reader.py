"""Turns the generated text of one choice into events: content, reasoning and tool calls."""

from __future__ import annotations

from llm_serving.parsing.events import Content, Event
from llm_serving.parsing.parser import OutputParser
from llm_serving.server.generation.answer_plan import AnswerPlan


class PieceReader:
    """Parses the text of one choice piece by piece, as its plan states. Without a plan, all text is content."""

    def __init__(self, plan: AnswerPlan | None) -> None:
        self._parser: OutputParser | None = None if plan is None else plan.parser()
        self._num_chars = 0

    @property
    def has_calls(self) -> bool:
        """Whether a tool call has begun."""
        return self._parser is not None and self._parser.has_calls

    def events(self, text: str, *, is_last: bool) -> list[Event]:
        """Returns the parser's events for the next piece of text."""
        if self._parser is None:
            begin = self._num_chars
            self._num_chars += len(text)
            return [Content(text, begin, self._num_chars)] if text else []
        events = self._parser.feed(text)
        return events + self._parser.finish() if is_last else events
