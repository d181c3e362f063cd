"""Parses a body of the type ``multipart/form-data`` while it arrives, with bounded memory.

The form is that of RFC 7578: parts with a header ``Content-Disposition``, separated by a boundary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from llm_serving.errors import RequestError
from llm_serving.server.fields.validation import clip

MAX_HEADER_BYTES = 8192
"""Maximum size of the headers of a part."""
MAX_PARTS = 8
"""Maximum number of parts of a body."""
_BOUNDARY = re.compile(r"boundary=(?:\"([^\"]{1,70})\"|([^\s;\"]{1,70}))", re.IGNORECASE)
_NAME = re.compile(r';\s*name="([^"]*)"', re.IGNORECASE)
_FILENAME = re.compile(r';\s*filename="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


class InvalidFormError(RequestError):
    """The body of an upload is not a valid form."""

    code = "invalid_form"


@dataclass(frozen=True, slots=True)
class PartBegin:
    """A part of the form begins. ``filename`` is None if the part is a field and not a file."""

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class PartData:
    """A chunk of content. It belongs to the part that began last."""

    data: bytes


def boundary_of(content_type: str) -> bytes:
    """Returns the boundary that a header ``Content-Type`` states. Raises InvalidFormError."""
    kind, _, options = content_type.partition(";")
    found = _BOUNDARY.search(options)
    if kind.strip().lower() != "multipart/form-data" or found is None:
        raise InvalidFormError(
            f"The content type is {clip(content_type) or 'not given'!r}; send a form as 'multipart/form-data' with a "
            "boundary, for example with curl -F."
        )
    return (found[1] or found[2]).encode("latin-1", "replace")


class FormParser:
    """Divides a body, which arrives in chunks, into its parts: the beginning of each part, and then its content."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._buffer = b"\r\n"  # the line break before the first boundary, which the client does not send
        self._state = "content"
        self._num_parts = 0

    @property
    def is_complete(self) -> bool:
        """Whether the last boundary has arrived."""
        return self._state == "end"

    def feed(self, chunk: bytes) -> Iterator[PartBegin | PartData]:
        """Yields each part that begins in the next chunk of the body, and the content of parts.

        Raises InvalidFormError.
        """
        self._buffer += chunk
        while True:
            before = self._state
            if before == "content":
                yield from self._content()
            elif before == "boundary":
                self._after_boundary()
            elif before == "headers":
                yield from self._headers()
            else:
                self._buffer = b""
            if self._state == before:
                return

    def _content(self) -> Iterator[PartData]:
        at = self._buffer.find(self._delimiter)
        end = at if at >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
        content, self._buffer = self._buffer[:end], self._buffer[end:]
        if content and self._num_parts:
            yield PartData(content)
        if at >= 0:
            self._buffer = self._buffer[len(self._delimiter) :]
            self._state = "boundary"

    def _after_boundary(self) -> None:
        if len(self._buffer) < 2:
            return
        mark, self._buffer = self._buffer[:2], self._buffer[2:]
        if mark == b"--":
            self._state = "end"
        elif mark == b"\r\n":
            self._buffer = b"\r\n" + self._buffer  # so that ``_headers`` also finds the end of empty headers
            self._state = "headers"
        else:
            raise InvalidFormError("The form has a boundary that neither a line break nor '--' follows.")

    def _headers(self) -> Iterator[PartBegin]:
        at = self._buffer.find(b"\r\n\r\n")
        if at > MAX_HEADER_BYTES or (at < 0 and len(self._buffer) > MAX_HEADER_BYTES):
            raise InvalidFormError(f"A part of the form has headers with more than {MAX_HEADER_BYTES} bytes.")
        if at < 0:
            return
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidFormError(f"The form has more than {MAX_PARTS} parts.")
        headers, self._buffer = self._buffer[:at].decode("utf-8", "replace"), self._buffer[at + 4 :]
        self._state = "content"
        yield _begin(headers)


def _begin(headers: str) -> PartBegin:
    for line in headers.split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() != "content-disposition":
            continue
        name, filename = _NAME.search(value), _FILENAME.search(value)
        if name is not None:
            return PartBegin(name[1], None if filename is None else re.sub(r"\\(.)", r"\1", filename[1]))
    raise InvalidFormError("A part of the form has no header 'Content-Disposition' with a name.")
