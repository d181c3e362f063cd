"""Changes bytes and JSON values at random for fuzz tests. Most of the structure stays.

All functions draw from the given ``random.Random``, so a seed repeats a case.
"""

from __future__ import annotations

import copy
import random
import struct
from typing import Any

INTEGERS = (0, 1, -1, 2, 7, 8, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
TEXTS = ("", "a", "\x00", "../x", "/etc/passwd", "é", "\u2028", "\ud7ff", "NaN", "x" * 300, "%s%n", "__class__")
VALUES: tuple[object, ...] = (None, True, False, 0.5, -0.0, 1e308, [], {}, [[]], [None], {"a": 1}, *INTEGERS, *TEXTS)
MAX_BLOCK = 64
"""Maximum number of bytes that one change of bytes moves, repeats or removes."""


def mutate_bytes(rng: random.Random, data: bytes, *, until: int | None = None) -> bytes:
    """Returns ``data`` with one to four changes. If ``until`` is given, only bytes before this offset change."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _BYTE_CHANGES[rng.randrange(len(_BYTE_CHANGES))](rng, changed, min(until or len(changed), len(changed)))
    return bytes(changed)


def mutate_value(rng: random.Random, value: Any) -> Any:
    """Returns a copy of a JSON value with one change: a place gets another value or another key, or is deleted."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.05:
        return rng.choice(VALUES) if rng.random() < 0.7 else _near(rng, value)
    changed = copy.deepcopy(value)
    places = _places(changed)
    parent, key = places[rng.randrange(len(places))]
    kind = rng.random()
    if kind < 0.15:
        del parent[key]
    elif kind < 0.3 and isinstance(parent, dict):
        parent[rng.choice(TEXTS) + str(key)] = parent.pop(key)
    elif kind < 0.4 and isinstance(parent, list):
        parent.extend([copy.deepcopy(parent[key])] * rng.choice((1, 3, 100)))
    elif kind < 0.45:
        parent[key] = _nested(rng, rng.choice((5, 30, 120)))
    elif kind < 0.7:
        parent[key] = _near(rng, parent[key])
    else:
        parent[key] = copy.deepcopy(rng.choice(VALUES))
    return changed


def _near(rng: random.Random, value: Any) -> Any:
    """Returns a value that is nearly right. It has the same type, or a type that resembles it."""
    if isinstance(value, bool):
        return rng.choice((not value, int(value), str(value).lower()))
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, value * 2, float(value), str(value), *INTEGERS))
    if isinstance(value, float):
        return rng.choice((-value, value * 1e30, int(value) if abs(value) < 1e9 else 0, str(value)))
    if isinstance(value, str):
        return rng.choice((value * 2, value[:-1], value + "\x00", value.upper(), f" {value}", [value], *TEXTS))
    if isinstance(value, bytes):
        return rng.choice((value[:-1], value + b"\x00", value[::-1], b"", value * 40))
    return rng.choice(VALUES)


def _nested(rng: random.Random, depth: int) -> Any:
    value: Any = 1
    is_list = rng.random() < 0.5
    for _ in range(depth):
        value = [value] if is_list else {"a": value}
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Returns each place inside a JSON value as a pair: the dict or list, and the key or index in it."""
    places: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        parent = waiting.pop()
        keys: list[Any] = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
        places += [(parent, key) for key in keys]
        waiting += [parent[key] for key in keys if isinstance(parent[key], dict | list)]
    return places


def _block(rng: random.Random, until: int) -> tuple[int, int]:
    start = rng.randrange(until) if until else 0
    return start, min(until, start + rng.randint(1, MAX_BLOCK))


def _flip_bit(rng: random.Random, data: bytearray, until: int) -> None:
    if until:
        data[rng.randrange(until)] ^= 1 << rng.randrange(8)


def _set_byte(rng: random.Random, data: bytearray, until: int) -> None:
    if until:
        data[rng.randrange(until)] = rng.randrange(256)


def _truncate(rng: random.Random, data: bytearray, until: int) -> None:
    del data[rng.randrange(until + 1) :]


def _remove(rng: random.Random, data: bytearray, until: int) -> None:
    start, end = _block(rng, until)
    del data[start:end]


def _repeat(rng: random.Random, data: bytearray, until: int) -> None:
    start, end = _block(rng, until)
    data[start:start] = data[start:end]


def _insert(rng: random.Random, data: bytearray, until: int) -> None:
    start = rng.randrange(until + 1)
    data[start:start] = rng.randbytes(rng.randint(1, 16))


def _set_integer(rng: random.Random, data: bytearray, until: int) -> None:
    """Overwrites 2, 4 or 8 bytes with an extreme number, because they may be a length, a count or an offset."""
    size = rng.choice((2, 4, 8))
    if until >= size:
        start = rng.randrange(until - size + 1)
        number = rng.choice(INTEGERS) & ((1 << 8 * size) - 1)
        data[start : start + size] = number.to_bytes(size, rng.choice(("little", "big")))


def _announce_huge(rng: random.Random, data: bytearray, until: int) -> None:
    """Overwrites 5 bytes with a MessagePack header that announces a map, list, text or binary of up to 2^32 - 1
    entries.
    """
    start = rng.randrange(until + 1)
    data[start : start + 5] = struct.pack(">BI", rng.choice((0xDD, 0xDF, 0xDB, 0xC6)), rng.choice((2**32 - 1, 2**31)))


_BYTE_CHANGES = (_flip_bit, _set_byte, _truncate, _remove, _repeat, _insert, _set_integer, _announce_huge)
