"""Chat templates: Jinja programs that turn messages into a prompt. They run as in Hugging Face transformers.

A template comes with the model and is not trusted. It runs in Jinja's immutable sandbox and cannot load anything.
Limits bound the length of its output, the length of its loops and the values that it may compute with ``*`` and ``**``.
If user text spells a special token, the tokenizer reads it as that token, as in transformers (see
``docs/http_api.md``).
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

MAX_COUNTED = 1_000_000
"""Maximum total length of all ranges that a template makes in one rendering. It limits the time of nested loops."""
MAX_REPEATED = 1_000_000
"""Maximum length of the result of ``text * number``, in characters or items."""
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
"""Errors that a template may raise on messages that it does not expect."""


class _GenerationTag(jinja2.ext.Extension):
    """Accepts ``{% generation %}``, which marks the model's own messages for training. It does not change a prompt."""

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
    """Return JSON without HTML escapes, as transformers does. Jinja's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox that refuses products and powers that would take long or fill the memory."""

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
    """Provides the ``range`` function of one rendering. It counts the numbers of all its ranges."""

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
    """One compiled template. ``source`` is None for a model without a template, which cannot render messages.

    The template sees ``variables`` (``bos_token``, ``eos_token``, ...) as well as the messages. Raises CheckpointError
    if the source is not a valid template.
    """

    def __init__(self, source: str | None, variables: Mapping[str, str], *, name: str = "chat_template") -> None:
        self.is_missing = source is None
        self._variables = dict(variables)
        try:
            self._template = _environment().from_string(source or "")
        except (jinja2.TemplateError, RecursionError) as reason:
            raise CheckpointError(f"{name}: not a valid chat template: {reason}") from reason

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, max_chars: int | None = None
    ) -> str:
        """Return the prompt, with special tokens spelled out. Encode it with ``add_special_tokens=False``.

        Raises RequestError if there is no template, if the template refuses the messages, or if the prompt is longer
        than ``max_chars``.
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
