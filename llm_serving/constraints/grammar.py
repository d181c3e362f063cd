"""The grammars of structured output: the texts that a client allows as a response."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from llm_serving.errors import RequestError

MAX_GRAMMAR_BYTES = 65536
"""Maximum length of a schema, a regular expression or a grammar, in bytes of UTF-8."""
MAX_CHOICES = 1024
"""Maximum number of strings from which the generated text is chosen (``choice_grammar``)."""
MAX_COMPOSED_BYTES = 4 * MAX_GRAMMAR_BYTES
"""Maximum length of a grammar that the server has composed from several schemas."""
JSON_SCHEMA, REGEX, LARK, COMPOSED = "json_schema", "regex", "lark", "composed"
JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
"""Regular expression of the white space between the parts of JSON. Without a limit, a model may generate white space
until ``max_tokens``.
"""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that a client has sent or that the server has composed.

    ``kind`` is the language of ``text``: ``JSON_SCHEMA``, ``REGEX`` or ``LARK`` (llguidance's dialect of Lark). A
    ``COMPOSED`` grammar comes from the server. Its text is JSON with several grammars that refer to each other.
    """

    kind: str
    text: str


ANY_JSON_OBJECT = Grammar(JSON_SCHEMA, '{"type": "object"}')


def schema_grammar(schema: object, param: str = "schema") -> Grammar:
    """Returns the grammar of the JSON values that fit a JSON schema. ``schema`` is a parsed schema or its JSON text.

    Raises RequestError, which names the field ``param``, if a parsed schema is too long. Converting a schema of some
    megabytes to text would block the event loop.
    """
    if not isinstance(schema, str):
        _check_size(_least_chars(schema, MAX_GRAMMAR_BYTES), param)
    return Grammar(JSON_SCHEMA, schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False))


def choice_grammar(choices: Sequence[str], param: str = "choice") -> Grammar:
    """Returns the grammar of a fixed set of strings. Raises RequestError, which names the field ``param``, if they are
    too long. The check comes first, because escaping megabytes would block the event loop.
    """
    _check_size(sum(map(len, choices)), param)
    return Grammar(REGEX, "|".join(f"(?:{re.escape(choice)})" for choice in choices))


def _check_size(num_chars: int, param: str) -> None:
    if num_chars > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"'{param}' has at least {num_chars} bytes; the maximum is {MAX_GRAMMAR_BYTES}.",
            param=param,
            code="invalid_value",
        )


def _least_chars(schema: object, limit: int) -> int:
    """Returns a number of characters that the JSON text of ``schema`` has at least. Stops counting above ``limit``."""
    found = 0
    values = [schema]
    while values and found <= limit:
        one = values.pop()
        if isinstance(one, dict | list):
            found += 2 * len(one)  # the brackets, and the comma and space between two values
            if found <= limit:
                values += one  # a dictionary yields its keys
                values += one.values() if isinstance(one, dict) else ()
        else:
            found += len(one) + 2 if isinstance(one, str) else 1
    return found
