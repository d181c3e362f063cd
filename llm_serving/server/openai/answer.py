"""Formats reasoning and tool calls of a chat, whole or streamed, as OpenAI's API and vLLM do."""

from __future__ import annotations

from typing import Any

import orjson

from llm_serving.parsing.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning, collect
from llm_serving.parsing.parser import OutputParser
from llm_serving.request import FinishReason
from llm_serving.server.generation.answer_plan import AnswerPlan

TOOL_CALLS = "tool_calls"
"""The finish reason of a choice that ends with tool calls."""


def message_of(plan: AnswerPlan, text: str) -> tuple[dict[str, Any], bool]:
    """Returns the message of a choice with the output ``text``, and whether the message has tool calls."""
    parser = plan.parser()
    answer = collect([*parser.feed(text), *parser.finish()])
    content = answer.content or (None if answer.calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if plan.reasoning is not None:
        message["reasoning_content"] = answer.reasoning or None
    if answer.calls:
        message["tool_calls"] = [
            {"id": plan.call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return message, bool(answer.calls)


class DeltaWriter:
    """Turns the pieces of one choice into deltas, which are encoded as JSON."""

    def __init__(self, plan: AnswerPlan) -> None:
        self._plan = plan
        self._parser: OutputParser = plan.parser()

    def deltas(self, text: str, *, is_last: bool) -> list[bytes]:
        """Returns the deltas of the next piece of text."""
        events = self._parser.feed(text)
        if is_last:
            events += self._parser.finish()
        return [orjson.dumps(self._delta(event)) for event in events if not isinstance(event, CallEnd)]

    def finish_reason(self, reason: FinishReason) -> bytes | None:
        """Returns the finish reason ``tool_calls`` as JSON for a choice with tool calls. None for other choices."""
        return f'"{TOOL_CALLS}"'.encode() if self._parser.has_calls and reason is FinishReason.STOP else None

    def _delta(self, event: Event) -> dict[str, Any]:
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return {"reasoning_content": event.text}
        if isinstance(event, CallBegin):
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": self._plan.call_id(), "type": "function", "function": function}
            return {"tool_calls": [call]}
        assert isinstance(event, Arguments)
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
