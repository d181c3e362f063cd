"""The files of the web pages, each with its content type and the hash of its content. They are read once."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CONTENT_TYPES = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "json": "application/json",
    "txt": "text/plain",
    "woff2": "font/woff2",
}
"""Maps a suffix of a file name to the content type. Files with other suffixes are not served."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
"""The pages' Content-Security-Policy: files and requests of this server only. Only DOMPurify may turn text into
elements (Trusted Types), so no other code can make active HTML from a model's output."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file of the web pages."""

    path: str
    """Path below the folder ``static``, with ``/`` between folders."""
    content_type: str
    body: bytes
    sha256: str


@functools.cache
def static_files() -> Mapping[str, StaticFile]:
    """Returns all files of the web pages by their paths."""
    folder = Path(__file__).parent / "static"
    found = {}
    for place in sorted(folder.rglob("*")):
        kind = CONTENT_TYPES.get(place.suffix.removeprefix("."))
        if place.is_file() and kind is not None:
            body, path = place.read_bytes(), place.relative_to(folder).as_posix()
            found[path] = StaticFile(path, kind, body, hashlib.sha256(body).hexdigest())
    return found
