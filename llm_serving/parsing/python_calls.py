"""Reads calls that are written like calls in Python: ``[weather(city="Bern", days=3), now()]``.

The text is never run or compiled. This reader knows only literals, and passes their JSON on while it reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from llm_serving.parsing.parameters import STRING, as_json
from llm_serving.parsing.reader import Reader, Steps, expect, pass_until, peek, skip

_MAX_DEPTH = 32
"""Maximum depth of lists and dictionaries in an argument."""
_NAME = re.compile(r"[\w.-]*")
_KEYWORD = re.compile(r"\w*")
_BARE = re.compile(r"""[^,()\[\]{}'":=\n]*""")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\\": "\\", "'": "'",
            '"': '"', "\n": ""}  # fmt: skip
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
"""Number of hexadecimal digits after ``\\x``, ``\\u`` and ``\\U``."""

Types = Mapping[str, frozenset[str]]


def read_python_calls(reader: Reader, tools: Mapping[str, Types]) -> Steps[None]:
    """Reads a list of calls. ``tools`` has the types of each tool's parameters.

    The caller must first start recording the text. Text that is no call of a known tool becomes content.
    """
    separator = yield from expect(reader, "[")
    while separator is not None and separator != "]":
        yield from skip(reader)
        name = yield from _take_while(reader, _NAME)
        if name not in tools or not (yield from _call(reader, name, tools[name])):
            break
        reader.record = []
        yield from skip(reader)
        separator = yield from expect(reader, ",", "]")
    if separator == "]":
        reader.recorded()
    elif reader.record is not None:
        reader.content(reader.recorded())


def _call(reader: Reader, name: str, types: Types) -> Steps[bool]:
    """Reads the rest of a call after its name. Returns True if the call is complete."""
    yield from skip(reader)
    if (yield from expect(reader, "(")) is None:
        return False
    yield from skip(reader)
    if (yield from expect(reader, ")")) is not None:
        reader.begin_call(name)
        reader.arguments("{}")
        reader.end_call()
        return True
    key = yield from _keyword(reader)
    if key is None:
        return False
    reader.begin_call(name)
    separator = "{"
    while key is not None:
        reader.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        if not (yield from _value(reader, types.get(key, frozenset()), 0)):
            return False
        comma = yield from _comma(reader)
        if (yield from expect(reader, ")")) is not None:
            reader.arguments("}")
            reader.end_call()
            return True
        reader.record = []
        key = (yield from _keyword(reader)) if comma else None
        if key is not None:
            reader.record = None
    return False


def _keyword(reader: Reader) -> Steps[str | None]:
    """Reads the name of a parameter and the equals sign. Returns the name, or None if another text follows."""
    key = yield from _take_while(reader, _KEYWORD)
    yield from skip(reader)
    return key if key and (yield from expect(reader, "=")) is not None else None


def _comma(reader: Reader) -> Steps[bool]:
    """Reads a comma and the white space around it. Returns False if there is no comma."""
    yield from skip(reader)
    found = (yield from expect(reader, ",")) is not None
    yield from skip(reader)
    return found


def _value(reader: Reader, types: frozenset[str], depth: int) -> Steps[bool]:
    """Reads a literal and passes its JSON to the arguments. Returns False if no complete literal follows."""
    yield from skip(reader)
    first = yield from peek(reader)
    if first in ("'", '"'):
        return (yield from _string(reader))
    if first in ("[", "{"):
        return depth < _MAX_DEPTH and (yield from _items(reader, "]" if first == "[" else "}", depth + 1))
    bare = (yield from _take_while(reader, _BARE)).strip()
    # A value at the end of the text may be cut.
    if not bare or not (yield from peek(reader)):
        return False
    reader.arguments(_bare_json(bare, types))
    return True


def _bare_json(text: str, types: frozenset[str]) -> str:
    """Returns a word or a number as JSON. Some models write texts without quotes, so other words become strings."""
    word = _WORDS.get(text, text)
    if types == {STRING} or not (word in ("true", "false", "null") or _NUMBER.fullmatch(word)):
        return json.dumps(text, ensure_ascii=False)
    return as_json(word, types)


def _items(reader: Reader, close: str, depth: int) -> Steps[bool]:
    """Reads a list or a dictionary, which ends with ``close``. Returns False if it is not complete."""
    reader.arguments(reader.take(1))
    has_comma, separator = True, ""
    while True:
        yield from skip(reader)
        if (yield from expect(reader, close)) is not None:
            reader.arguments(close)
            return True
        if not has_comma:
            return False
        reader.arguments(separator)
        separator = ", "
        if close == "}":
            if (yield from peek(reader)) not in ("'", '"') or not (yield from _string(reader)):
                return False
            yield from skip(reader)
            if (yield from expect(reader, ":")) is None:
                return False
            reader.arguments(": ")
        if not (yield from _value(reader, frozenset(), depth)):
            return False
        has_comma = yield from _comma(reader)


def _string(reader: Reader) -> Steps[bool]:
    """Reads a string with its quotes. Returns False if the string is not complete."""
    quote = (yield from expect(reader, '"""', "'''")) or reader.take(1)
    reader.arguments('"')
    while True:
        marker = yield from pass_until(reader, (quote, "\\"), lambda text: reader.arguments(_inside(text)))
        if marker == "\\" and (yield from peek(reader)):
            reader.arguments((yield from _escape(reader)))
        elif marker == quote:
            reader.arguments('"')
            return True
        else:
            return False


def _escape(reader: Reader) -> Steps[str]:
    """Reads the rest of an escape sequence after its backslash. Returns its character as the inside of a JSON string.

    As in Python, an unknown sequence stands for itself.
    """
    char = reader.take(1)
    if char in _ESCAPES:
        return _inside(_ESCAPES[char])
    if char in "01234567":
        digits = char + (yield from _digits(reader, "01234567", 2))
        return _inside(chr(int(digits, 8)))
    if char in _HEX_DIGITS:
        count = _HEX_DIGITS[char]
        digits = yield from _digits(reader, "0123456789abcdefABCDEF", count)
        if len(digits) == count and int(digits, 16) < 0x110000:
            return _inside(chr(int(digits, 16)))
        return _inside(f"\\{char}{digits}")
    return _inside(f"\\{char}")


def _digits(reader: Reader, allowed: str, count: int) -> Steps[str]:
    """Reads at most ``count`` digits."""
    found = ""
    while len(found) < count:
        digit = yield from peek(reader)
        if not digit or digit not in allowed:
            break
        found += reader.take(1)
    return found


def _inside(text: str) -> str:
    """Returns ``text`` as the inside of a JSON string. Half of a surrogate pair becomes an escape sequence."""
    has_surrogate = any("\ud800" <= char <= "\udfff" for char in text)
    return json.dumps(text, ensure_ascii=has_surrogate)[1:-1]


def _take_while(reader: Reader, pattern: re.Pattern[str]) -> Steps[str]:
    """Reads and returns the next characters while they match ``pattern``."""
    taken = ""
    while True:
        match = pattern.match(reader.text)
        taken += reader.take(match.end() if match else 0)
        if reader.text or reader.is_closed:
            return taken
        yield
