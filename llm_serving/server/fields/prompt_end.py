"""The fields that decide where the prompt of a chat ends: at the start of a new message, or inside the last message.

The meaning is that of vLLM and of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from llm_serving.errors import RequestError
from llm_serving.parsing.formats import OutputFormat
from llm_serving.server.fields.shared import Message
from llm_serving.server.fields.validation import StrictModel

_FIELD = "continue_final_message"
_MARK = "CONTINUE_FINAL_MESSAGE_HERE "
"""Stands at the end of the continued message while the template renders it. The prompt is cut there.

The text of the message itself cannot show the place, because the template may contain the same text after it. The space
at the end shows whether the template removes white space at the end of messages.
"""

NO_TEMPLATE = (
    "a template is a program, and for security the server runs only the one of the model folder "
    "(chat_template.jinja); leave it out"
)
"""The remedy in the error for the field ``chat_template``, which vLLM can accept."""


class PromptEndFields(StrictModel):
    """Fields of ``/v1/chat/completions`` and ``/tokenize`` that decide where the prompt ends."""

    add_generation_prompt: bool | None = Field(
        default=None,
        description="End the prompt where the assistant's next message begins. Default: true, or false with "
        "`continue_final_message`.",
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="End the prompt after the text of the last message, which must be the assistant's. The output "
        "continues this text.",
    )

    @property
    def opens_message(self) -> bool:
        """Whether the prompt ends where the assistant's next message begins."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    def check_prompt_end(self, messages: Sequence[Message], output_format: OutputFormat) -> None:
        """Raises RequestError if the fields contradict each other, or if the last message cannot be continued."""
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise RequestError(
                f"'{_FIELD}' and 'add_generation_prompt' are both true. One continues the last message, the other "
                "begins a new one; set one of them to false.",
                param=_FIELD,
                code="invalid_value",
            )
        if output_format.reasoning is not None and output_format.reasoning.is_in_channels:
            raise RequestError(
                f"'{_FIELD}' is not supported for this model, whose messages consist of channels; leave it out.",
                param=_FIELD,
                code="unsupported_parameter",
            )
        last = messages[-1]
        if last.role != "assistant":
            raise _not_continued(f"the last message has the role '{last.role}'")
        if last.tool_calls:
            raise _not_continued("the last message has tool calls")
        if last.parts:
            raise _not_continued("the last message has images")
        if not last.content:
            raise _not_continued("the last message has no text")


def with_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the input of the chat template with the mark at the end of the last message."""
    *earlier, last = messages
    return [*earlier, {**last, "content": last["content"] + _MARK}]


def cut_at_mark(text: str) -> str:
    """Returns a rendered prompt up to the end of the last message. Raises RequestError if the mark is not there.

    If the template removes white space at the end of messages, the result has none there.
    """
    place = text.rfind(_MARK.rstrip())
    if place < 0:
        raise _not_continued("the model's chat template does not write the text of the last message")
    return text[:place] if text.startswith(_MARK, place) else text[:place].rstrip()


def _not_continued(problem: str) -> RequestError:
    return RequestError(
        f"'{_FIELD}' needs a last message of the assistant with text, but {problem}.",
        param=_FIELD,
        code="invalid_value",
    )
