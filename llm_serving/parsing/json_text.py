"""Reads JSON from a text that arrives in pieces, and passes the text to a function without changes."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from llm_serving.parsing.reader import SPACE, Reader, Sink, Steps, expect, peek, skip

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_ARGUMENT_KEYS = ("arguments", "parameters")


def pass_value(reader: Reader, sink: Sink) -> Steps[bool]:
    """Reads one JSON value and passes its text to ``sink``. Returns False if the text ends before the value is
    complete.

    The end of an object, a list or a string follows from brackets and quotes. Nothing else in the value is checked.
    """
    first = yield from peek(reader)
    if first not in ("{", "[", '"'):
        return (yield from _pass_scalar(reader, sink))
    depth, in_string = 0, False
    while True:
        text, position, is_complete = reader.text, 0, False
        while position < len(text) and not is_complete:
            match = (_INSIDE if in_string else _OUTSIDE).search(text, position)
            if match is None:
                position = len(text)
                break
            position, char = match.end(), match[0]
            if char == "\\":
                if position == len(text):  # the escaped character has not arrived yet
                    position -= 1
                    break
                position += 1
            elif char == '"':
                in_string = not in_string
                is_complete = not in_string and depth == 0
            else:
                depth += 1 if char in "{[" else -1
                is_complete = depth == 0
        if position:
            sink(reader.take(position))
        if is_complete:
            return True
        if reader.is_closed:
            sink(reader.take(len(reader.text)))
            return False
        yield


def _pass_scalar(reader: Reader, sink: Sink) -> Steps[bool]:
    """Reads a number, ``true``, ``false`` or ``null``, up to the next character that cannot be part of the value.
    Passes its text to ``sink``.
    """
    while True:
        end = re.search(r"[^\w.+-]", reader.text)
        if end is not None:
            sink(reader.take(end.start()))
            return True
        sink(reader.take(len(reader.text)))
        if reader.is_closed:
            return True
        yield


def read_string(reader: Reader) -> Steps[str | None]:
    """Reads a JSON string. Returns its value, or None if no valid string follows."""
    pieces: list[str] = []
    if (yield from peek(reader)) != '"' or not (yield from pass_value(reader, pieces.append)):
        return None
    try:
        value = json.loads("".join(pieces), strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def read_calls(reader: Reader, names: Collection[str] | None = None) -> Steps[bool]:
    """Reads one object with the name and the arguments of a call, or a list of these objects. Returns True if there was
    a call.

    The caller must first start recording the text (``reader.record = []``). If the first object is not a call, the
    recorded text becomes content, and the result is False. If ``names`` is given, only objects with one of these tool
    names are calls.
    """
    if (yield from peek(reader)) != "[":
        return (yield from _read_call(reader, names))
    reader.take(1)
    is_first = True
    while True:
        yield from skip(reader, SPACE + ",")
        char = yield from peek(reader)
        if char == "{":
            reader.record = [] if reader.record is None else reader.record
            if not (yield from _read_call(reader, names)):
                return not is_first
            is_first = False
        elif is_first:
            reader.content(reader.recorded())
            return False
        else:
            yield from expect(reader, "]")
            return True


def _read_call(reader: Reader, names: Collection[str] | None) -> Steps[bool]:
    """Reads one object. Returns True if the object is a call. Otherwise, the recorded text becomes content."""
    is_call = False
    if (yield from expect(reader, "{")) is not None:
        is_call = yield from _read_members(reader, names)
    if not is_call:
        reader.content(reader.recorded())
    return is_call


def _read_members(reader: Reader, names: Collection[str] | None) -> Steps[bool]:
    """Reads the members of an object after its opening brace. Returns True if a call has begun.

    If the arguments come before the tool's name, they are kept until the name is known.
    """
    has_begun = has_arguments = False
    early: list[str] = []
    while True:
        yield from skip(reader, SPACE + ",")
        char = yield from peek(reader)
        if char != '"':
            is_complete = (yield from expect(reader, "}")) is not None
            break
        key = yield from read_string(reader)
        yield from skip(reader)
        if key is None or (yield from expect(reader, ":")) is None:
            is_complete = False
            break
        yield from skip(reader)
        if key == "name" and not has_begun:
            name = yield from read_string(reader)
            if name is None or (names is not None and name not in names):
                return False
            reader.begin_call(name)
            reader.arguments("".join(early))
            has_begun = True
        elif key in _ARGUMENT_KEYS and not has_arguments:
            has_arguments = True
            if not (yield from _pass_arguments(reader, reader.arguments if has_begun else early.append)):
                is_complete = False
                break
        elif not (yield from pass_value(reader, _ignore)):
            is_complete = False
            break
    if has_begun and (is_complete or (yield from peek(reader))):
        if not has_arguments:
            reader.arguments("{}")
        reader.end_call()
    return has_begun


def _pass_arguments(reader: Reader, sink: Sink) -> Steps[bool]:
    """Reads the arguments of a call and passes them to ``sink`` as a JSON object. Returns True if they are complete.

    Some models write the object within a string, or ``null`` instead of an empty object.
    """
    char = yield from peek(reader)
    if char == "{":
        return (yield from pass_value(reader, sink))
    if char == '"':
        text = yield from read_string(reader)
        sink(text or "{}")
        return text is not None
    yield from pass_value(reader, _ignore)
    sink("{}")
    return True


def _ignore(text: str) -> None:
    """Drops a text that is not needed."""
