"""Encodes large JSON responses in pieces, so that no single call takes long, and sends them piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import orjson
from starlette.types import Receive, Scope, Send

ITEMS_PER_PIECE = 8
"""Number of list items in one call of the JSON encoder. It is small, because other threads cannot run during a call.

A small number also avoids garbage collections. The items of one call are in memory at the same time. A token with 20
alternatives has 43 objects that the garbage collector tracks. Python starts a collection when the number of tracked
objects has grown by 700. Eight items rarely reach this number.
"""
SEND_BYTES = 128 * 1024
"""Number of bytes after which the sender of a response lets other tasks run."""
PIECE_BYTES = 16 * 1024
"""Minimum size of a piece of a ``GrowingList``, so that a long list has few pieces."""

_MARK = b"\0"
"""Byte that stands for an ``EncodedList`` while the rest of the content is encoded. JSON never contains this byte."""


class EncodedList:
    """A list that is already encoded as JSON. Its text is the concatenation of ``pieces``."""

    def __init__(self, items: Iterable[object]) -> None:
        self.pieces = list(_pieces_of_list(iter(items)))

    @classmethod
    def of_encoded(cls, items: Iterable[bytes]) -> EncodedList:
        """Returns a list whose items are already encoded as JSON."""
        encoded = cls(())
        encoded.pieces = [b"[", b",".join(items), b"]"]
        return encoded


class GrowingList:
    """A list that encodes each item as JSON when the item is added. So a complete list needs no further encoding."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._parts: list[bytes] = []
        """Parts of the next piece, which has ``_num_bytes`` bytes until now."""
        self._num_bytes = 0

    def add(self, items: bytes) -> None:
        """Adds one or more items. ``items`` is their JSON, with commas between the items and without brackets."""
        self._parts += (b"," if self._pieces or self._parts else b"[", items)
        self._num_bytes += 1 + len(items)
        if self._num_bytes >= PIECE_BYTES:
            self._pieces.append(b"".join(self._parts))
            self._parts, self._num_bytes = [], 0

    def encoded(self) -> EncodedList | list[object]:
        """Returns the encoded list, for ``encode_in_pieces``. Without items, returns an empty Python list instead."""
        if not self._pieces and not self._parts:
            return []
        encoded = EncodedList(())
        encoded.pieces = [*self._pieces, b"".join(self._parts), b"]"]
        return encoded


def encode_in_pieces(content: object) -> list[bytes]:
    """Returns a JSON value as pieces of bytes. Each ``EncodedList`` in the value adds its pieces unchanged."""
    lists: list[EncodedList] = []

    def default(value: object) -> orjson.Fragment:
        if not isinstance(value, EncodedList):
            raise TypeError(f"{type(value).__name__} is not JSON")
        lists.append(value)
        return orjson.Fragment(_MARK)

    first, *others = orjson.dumps(content, default=default).split(_MARK)
    pieces = [first]
    for encoded, other in zip(lists, others, strict=True):
        pieces += (*encoded.pieces, other)
    return pieces


class PiecesResponse:
    """A JSON response in pieces. It waits for a slow client, and lets other tasks run between the pieces."""

    def __init__(self, pieces: Sequence[bytes], headers: Mapping[str, str]) -> None:
        self.status_code = 200
        self._pieces = pieces
        self._headers = {
            "content-type": "application/json",
            "content-length": str(sum(map(len, pieces))),
            **headers,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in self._headers.items()]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        part = b""
        for following in joined(self._pieces):
            if part:
                await send({"type": "http.response.body", "body": part, "more_body": True})
                await asyncio.sleep(0)
            part = following
        # Send the last bytes and the end of the response together. A client that has all bytes may immediately send its
        # next request. If the response were not complete then, the connection would close.
        await send({"type": "http.response.body", "body": part, "more_body": False})


def _pieces_of_list(items: Iterator[object]) -> Iterator[bytes]:
    opening = b"["
    while group := list(islice(items, ITEMS_PER_PIECE)):
        yield opening + orjson.dumps(group)[1:-1]
        opening = b","
    yield b"[]" if opening == b"[" else b"]"


def joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Joins small pieces to parts of about ``SEND_BYTES``."""
    part: list[bytes] = []
    size = 0
    for piece in pieces:
        part.append(piece)
        size += len(piece)
        if size >= SEND_BYTES:
            yield b"".join(part)
            part, size = [], 0
    if part:
        yield b"".join(part)
