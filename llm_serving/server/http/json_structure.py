"""Counts the values, keys and brackets of a JSON text without parsing it, so that limits apply before the parser."""

from __future__ import annotations

from dataclasses import dataclass

SLICE_BYTES = 64 * 1024
"""Number of bytes of a slice, which is examined without interruption. Other threads may run between two slices."""

_AS_SQUARE = bytes.maketrans(b"{}", b"[]")
_NOT_STRUCTURAL = bytes(byte for byte in range(256) if byte not in b"[]{},:")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


@dataclass(frozen=True, slots=True)
class JSONStructure:
    """Counts of the parts of a JSON text. They are exact for valid JSON, except ``num_values``."""

    num_values: int
    """Number of values, without the keys. An empty object or list counts as two values."""
    num_containers: int
    """Number of objects and lists."""
    num_strings: int
    """Number of strings, keys included."""
    num_keys: int
    """Number of keys of all objects. A repeated key counts each time."""
    brackets: bytes
    """All brackets and braces of the text in their order. Braces are replaced by square brackets."""

    def is_deeper_than(self, depth: int) -> bool:
        """Returns whether containers are nested deeper than ``depth``. Returns False if brackets do not match."""
        brackets = self.brackets
        for _ in range(depth):  # each pass removes the innermost brackets
            brackets = brackets.replace(b"[]", b"")
        return bool(brackets) and brackets.count(b"[") == brackets.count(b"]")


def structure_of(text: bytes) -> JSONStructure:
    """Returns the structure of a JSON text. The time and the memory are proportional to its length.

    For invalid JSON the counts mean nothing, and no error is raised. The JSON parser refuses the text afterwards.
    """
    commas = keys = quotes = start = 0
    brackets = []
    while start < len(text):
        end = _slice_end(text, start)
        parts = text[start:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[quotes % 2 :: 2]).translate(None, _NOT_STRUCTURAL)
        quotes += len(parts) - 1
        commas += outside.count(b",")
        keys += outside.count(b":")
        brackets.append(outside.translate(_AS_SQUARE, _NO_BRACKETS))
        start = end
    joined = b"".join(brackets)
    containers = joined.count(b"[")
    return JSONStructure(commas + containers + 1, containers, quotes // 2, keys, joined)


def count_keys(value: object) -> int:
    """Returns the number of keys of all objects in a parsed JSON value."""
    keys = 0
    values = [value]
    while values:
        one = values.pop()
        if isinstance(one, dict):
            keys += len(one)
            values += one.values()
        elif isinstance(one, list):
            values += [each for each in one if isinstance(each, dict | list)]
    return keys


def count_values(value: object, limit: int) -> int:
    """Returns the number of values inside a parsed JSON value. If there are more than ``limit``, stops counting and
    returns a number above ``limit``.
    """
    found = 0
    values = [value]
    while values and found <= limit:
        one = values.pop()
        children = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        found += len(children)
        if found <= limit:
            values += [each for each in children if isinstance(each, dict | list)]
    return found


def _slice_end(text: bytes, start: int) -> int:
    """Returns the end of the slice that begins at ``start``. A slice never ends inside an escape sequence."""
    end = min(start + SLICE_BYTES, len(text))
    backslashes = end - start - len(text[start:end].rstrip(b"\\"))
    return min(end + backslashes % 2, len(text))
