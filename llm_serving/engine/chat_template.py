"""Chat templates: Jinja programs that turn messages into a prompt, run as Hugging Face transformers runs them.

A template comes with the model, so it is not trusted: it runs in Jinja's immutable sandbox, cannot load anything, and
what it writes, how far it counts and how large a value it may make by ``*`` and ``**`` are bounded. User text that
spells a special token is that special token to the tokenizer, as with
transformers; see ``docs/http_api.md``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from llm_serving.errors import CheckpointError, RequestError

__all__ = ["ChatTemplate"]


MAX_COUNTED = 1_000_000
"""Numbers that all ``range`` calls of one rendering give together: nested loops stay short."""
MAX_REPEATED = 1_000_000
"""Characters or items that ``text * number`` may make."""
_MAX_BITS = 256

_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)
"""What a template may raise on messages it was not written for."""


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the model's own turns for training; for a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateRefusalError(Exception):
    """The template called ``raise_exception``."""


def _raise_exception(message: object) -> NoReturn:
    raise _TemplateRefusalError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Refuses products and powers that would take long or fill the memory."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if numbers and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_BITS:
                raise OverflowError(f"a number of more than {_MAX_BITS} bits")
        elif not numbers:
            length, times = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(times, int) and hasattr(length, "__len__") and len(length) * times > MAX_REPEATED:
                raise OverflowError(f"a product of more than {MAX_REPEATED} characters or items")
        return super().call_binop(context, operator, left, right)


class _Counter:
    """``range`` of one rendering."""

    def __init__(self) -> None:
        self._left = MAX_COUNTED

    def range(self, *limits: int) -> range:
        numbers = range(*limits)
        self._left -= len(numbers)
        if self._left < 0:
            raise OverflowError(f"loops over more than {MAX_COUNTED} numbers")
        return numbers


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template.

    ``variables`` (``bos_token``, ``eos_token``, ...) are visible to it beside the messages.
    Raises CheckpointError when the text is no template.
    """

    def __init__(self, source: str, variables: Mapping[str, str], *, name: str = "chat_template") -> None:
        self._variables = dict(variables)
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as reason:
            raise CheckpointError(f"{name}: not a valid chat template: {reason}") from reason

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, max_chars: int | None = None
    ) -> str:
        """The prompt text. Raises RequestError when the template refuses the messages or writes too much."""
        pieces = []
        length = 0
        try:
            for piece in self._template.generate(
                self._variables, messages=messages, tools=None, documents=None, range=_Counter().range,
                add_generation_prompt=add_generation_prompt,
            ):  # fmt: skip
                pieces.append(piece)
                length += len(piece)
                if max_chars is not None and length > max_chars:
                    raise RequestError(
                        f"The messages make a prompt of more than {max_chars} characters; shorten the conversation.",
                        param="messages",
                        code="context_length_exceeded",
                    )
        except _TemplateRefusalError as reason:
            raise RequestError(
                f"The model's chat template refused the messages: {reason}", param="messages"
            ) from reason
        except _TEMPLATE_FAILURES as reason:
            raise RequestError(
                f"The model's chat template failed on the messages: {type(reason).__name__}: {reason}", param="messages"
            ) from reason
        return "".join(pieces)
