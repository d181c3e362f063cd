"""Chat templates: Jinja programs that turn messages into a prompt. They run as in Hugging Face transformers.

A template comes with the model and is not trusted. It runs in Jinja's immutable sandbox and cannot load anything.
``template_sandbox`` bounds its time and its memory. If a user's text contains the text of a special token, the
tokenizer makes the special token of it, as in transformers (see ``docs/http_api.md``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import jinja2

from llm_serving.engine.template_budget import Budget, BudgetError
from llm_serving.engine.template_sandbox import TemplateEnvironment, TemplateRefusalError
from llm_serving.errors import CheckpointError, RequestError

SHOWN_CHARS = 500
"""Maximum number of characters of a template's own error message that the server shows to the client."""

_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)
"""Errors that a template may raise on messages that it does not expect."""


class TemplateBudgetError(RequestError):
    """The template needs more steps or makes more text than its budget for one rendering."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Determines the budget of a rendering: steps (operations of the template) and characters of generated text.

    Each budget is a constant, plus an amount per message, plus an amount per character of the messages.
    """

    steps: int
    chars: int
    steps_per_message: int = 0
    chars_per_char: int = 0

    def budget(self, messages: Sequence[Mapping[str, Any]]) -> Budget:
        """Returns the budget for rendering these messages. A list or an object in a message counts with the length of
        its JSON."""
        chars = sum(map(_length, (value for message in messages for value in message.values())))
        return Budget(
            self.steps + self.steps_per_message * len(messages) + chars // 4, self.chars + self.chars_per_char * chars
        )


WHOLE = Allowance(steps=1_000_000, chars=16_000_000, steps_per_message=1000, chars_per_char=64)
"""Budget of a rendering unless the caller names another. Usual templates take 20 steps for each message."""
SHORT = Allowance(steps=10_000, chars=1_000_000)
"""Budget of a rendering that blocks other work, for example on an event loop. It is used up in a few milliseconds."""


class ChatTemplate:
    """One compiled template. If the model has no template, ``source`` is None, and rendering raises RequestError.

    A template can read the messages and the ``variables`` (``bos_token``, ``eos_token``, ...). Raises CheckpointError
    if the source is not a valid template.
    """

    def __init__(self, source: str | None, variables: Mapping[str, str], *, name: str = "chat_template") -> None:
        self.is_missing = source is None
        self.source = source
        self._variables = dict(variables)
        self._environment = TemplateEnvironment()
        try:
            self._template = self._environment.compile_guarded(source or "")
        except (jinja2.TemplateError, RecursionError) as reason:
            raise CheckpointError(f"{name}: not a valid chat template: {reason}") from reason

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        values: Mapping[str, Any] | None = None,
        max_chars: int | None = None,
        day: date | None = None,
        allowance: Allowance = WHOLE,
    ) -> str:
        """Returns the prompt as text that contains the special tokens. Encode this text with
        ``add_special_tokens=False``.

        ``tools`` are the functions that the model may call. ``values`` are additional variables for the template.
        ``day`` is the date for templates that write one, or None for the present time.
        Raises RequestError if a value has the name of a variable that the server sets, or if there is no template.
        Also raises RequestError if the template refuses the messages, or if the prompt has more than ``max_chars``
        characters. Raises TemplateBudgetError if the template needs more than ``allowance``.
        """
        if self.is_missing:
            raise RequestError(
                "This model has no chat template, so it cannot answer messages; use /v1/completions with a prompt.",
                param="messages",
                code="no_chat_template",
            )
        pieces = []
        length = 0
        try:
            variables: dict[str, Any] = {
                **self._variables, "messages": messages, "tools": tools or None, "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }  # fmt: skip
            _check_names(values or {}, variables)
            variables.update(values or {})
            budget = allowance.budget([*messages, *(tools or ())])
            for piece in self._environment.pieces(self._template, budget, variables, day):
                pieces.append(piece)
                length += len(piece)
                if max_chars is not None and length > max_chars:
                    raise RequestError(
                        f"The messages make a prompt of more than {max_chars} characters; shorten the conversation.",
                        param="messages",
                        code="context_length_exceeded",
                    )
        except BudgetError as reason:
            raise TemplateBudgetError(
                f"The model's chat template failed on the messages: {reason}", param="messages"
            ) from reason
        except TemplateRefusalError as reason:
            raise RequestError(
                f"The model's chat template refused the messages: {str(reason)[:SHOWN_CHARS]}", param="messages"
            ) from reason
        except _TEMPLATE_FAILURES as reason:
            raise RequestError(
                f"The model's chat template failed on the messages: {type(reason).__name__}: "
                f"{str(reason)[:SHOWN_CHARS]}",
                param="messages",
            ) from reason
        return "".join(pieces)


def _length(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    return len(json.dumps(value)) if isinstance(value, list | dict) else 0


def _check_names(values: Mapping[str, Any], variables: Mapping[str, Any]) -> None:
    """Raises RequestError if one of the client's ``values`` has the name of a variable that the server sets."""
    if taken := sorted(values.keys() & variables.keys()):
        raise RequestError(
            f"'chat_template_kwargs' holds {taken[0]!r}, which the server sets.",
            param="chat_template_kwargs",
            code="invalid_value",
        )
