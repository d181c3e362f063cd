"""Decides how to parse the output of a chat: in which formats the model writes its reasoning and its tool calls."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llm_serving.errors import RequestError
from llm_serving.parsing.calls import CallOptions
from llm_serving.parsing.formats import ReasoningFormat, ToolFormat
from llm_serving.parsing.parameters import parameter_types
from llm_serving.parsing.parser import OutputParser
from llm_serving.parsing.thinking import ThinkingWatch
from llm_serving.server.fields.tools import NamedTool, Tool
from llm_serving.server.fields.validation import short
from llm_serving.server.generation.prompts import Prompt
from llm_serving.server.state import ServerState

_LETTERS = string.ascii_letters + string.digits
_SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that turn the reasoning on and off."""


class ToolRequest(Protocol):
    """The fields of a request that this module reads, see ``ToolFields``."""

    @property
    def tools(self) -> list[Tool] | None: ...
    @property
    def tool_choice(self) -> Any: ...
    @property
    def parallel_tool_calls(self) -> bool | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...
    @property
    def thinking_token_budget(self) -> int | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """States how to split the text of each choice into reasoning, content and tool calls."""

    tools: ToolFormat | None
    """The format of tool calls. None if the request has no tools."""
    reasoning: ReasoningFormat | None
    options: CallOptions
    is_thinking: bool
    """Whether the prompt ends with the start marker of the reasoning, so that the output begins inside the reasoning.
    """
    is_over: bool
    """Whether the prompt ends with the end marker of the reasoning, so that the model does not reason."""
    max_calls: int | None
    shown_token_ids: frozenset[int]
    """Ids of the special tokens that are markers. Their text must be in the output, because the parser looks for it."""

    def parser(self) -> OutputParser:
        """Returns the parser of one choice."""
        return OutputParser(
            self.tools, self.reasoning, self.options, is_thinking=self.is_thinking, max_calls=self.max_calls
        )

    def watch(self, token_bytes: Callable[[int], bytes]) -> ThinkingWatch | None:
        """Returns a new counter for the reasoning tokens of one choice. None for a model without reasoning."""
        if self.reasoning is None:
            return None
        return ThinkingWatch(self.reasoning, token_bytes, is_thinking=self.is_thinking)

    def call_id(self) -> str:
        """Returns a new id for a tool call."""
        if self.tools is not None and self.tools.id_chars:
            return "".join(secrets.choice(_LETTERS) for _ in range(self.tools.id_chars))
        return f"call_{uuid.uuid4().hex[:24]}"


def check_tool_fields(state: ServerState, body: ToolRequest) -> None:
    """Raises RequestError for fields of tools and reasoning that contradict each other or need an unsupported format.
    """
    formats, choice = state.output_format, body.tool_choice
    if body.tools and formats.tools is None:
        raise RequestError(
            "'tools' is turned off on this server (serving_config.tool_format).",
            param="tools",
            code="unsupported_parameter",
        )
    if not body.tools and (choice == "required" or isinstance(choice, NamedTool)):
        raise RequestError("'tool_choice' is only allowed with 'tools'.", param="tool_choice", code="invalid_value")
    if isinstance(choice, NamedTool) and all(tool.function.name != choice.name for tool in body.tools or ()):
        raise RequestError(
            f"'tool_choice' names {short(choice.name)}, which is none of the tools.",
            param="tool_choice",
            code="invalid_value",
        )
    if body.thinking_token_budget is not None and formats.reasoning is None:
        raise RequestError(
            "'thinking_token_budget' is not supported: the chat template of this model has no reasoning that the field "
            "could change. Leave it out.",
            param="thinking_token_budget",
            code="unsupported_parameter",
        )


def offered_tools(body: ToolRequest) -> Sequence[Tool]:
    """Returns the tools that the model sees. With the choice ``none`` it sees no tools."""
    return () if body.tool_choice == "none" else body.tools or ()


def template_values(state: ServerState, body: ToolRequest) -> Mapping[str, Any]:
    """Returns the variables for the chat template: those of ``chat_template_kwargs`` and of ``reasoning_effort``.

    The effort sets only the variables that the template reads. So it has no effect on a model without reasoning.
    ``chat_template_kwargs`` takes precedence.
    """
    effort = body.reasoning_effort
    if effort is None:
        return body.chat_template_kwargs
    values: dict[str, Any] = {"reasoning_effort": effort} | dict.fromkeys(_SWITCHES, effort != "none")
    known = state.output_format.effort_variables
    return {name: value for name, value in values.items() if name in known} | body.chat_template_kwargs


def plan_answer(state: ServerState, body: ToolRequest, prompt: Prompt) -> AnswerPlan | None:
    """Returns the plan for parsing the output after ``prompt``. None if all of the output is content."""
    formats, tools = state.output_format, offered_tools(body)
    channels = formats.tools if formats.reasoning is not None and formats.reasoning.is_in_channels else None
    used = formats.tools if tools else channels
    if used is None and formats.reasoning is None:
        return None
    markers = used.markers if used is not None else ()
    if formats.reasoning is not None:
        markers += (formats.reasoning.open, formats.reasoning.close)
    tokenizer = state.engine.tokenizer
    ids = {tokenizer.token_id(marker) for marker in markers}
    return AnswerPlan(
        formats.tools if tools else None,
        formats.reasoning,
        CallOptions({one.function.name: parameter_types(one.function.parameters) for one in tools}, bool(tools)),
        *_thinking_state(formats.reasoning, prompt),
        1 if body.parallel_tool_calls is False else None,
        frozenset(one for one in ids if one is not None and one in tokenizer.special_token_ids),
    )


def _thinking_state(reasoning: ReasoningFormat | None, prompt: Prompt) -> tuple[bool, bool]:
    """Returns whether the prompt ends inside the reasoning, and whether it ends after the reasoning.

    A message that the output continues contains its reasoning. So its last marker counts, wherever it is, and a message
    without markers has no reasoning.
    """
    if reasoning is None:
        return False, False
    if prompt.continued is not None:
        is_thinking = prompt.continued.rfind(reasoning.open) > prompt.continued.rfind(reasoning.close)
        return is_thinking, not is_thinking
    text = (prompt.text or "").rstrip()
    return text.endswith(reasoning.open), not reasoning.is_in_channels and text.endswith(reasoning.close)
