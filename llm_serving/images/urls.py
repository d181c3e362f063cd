"""Reads the bytes of an image from its URL: a data URL, or a file or a host that the operator has allowed."""

from __future__ import annotations

import base64
import binascii
import os
import stat
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes, urlsplit

from llm_serving.config.image_section import ImageConfig
from llm_serving.errors import RequestError

if TYPE_CHECKING:
    import requests

FETCH_TIMEOUT_S = 10.0
"""Maximum seconds without a byte from an allowed host."""
FETCH_TOTAL_S = 30.0
"""Maximum seconds to fetch all images of one request from allowed hosts."""
_SHOWN_CHARS = 64
"""Maximum length of a URL in an error message."""
_PIECE_BYTES = 65_536
"""Bytes that are read at a time while an image is downloaded."""
_BASE64_CHARS = 1 << 18
"""Number of base64 characters that are decoded in one call. It is a multiple of 4, because 4 characters encode 3 bytes.
"""
_MAX_SCHEME_CHARS = 16
"""Maximum length of the scheme of a URL, such as ``https``."""


class ImageError(RequestError):
    """An image of a request is wrong or too large, or its URL is not allowed."""

    code = "invalid_image"


@dataclass(slots=True)
class FetchTime:
    """The remaining time that a request may wait for other hosts. All images of the request share this time."""

    seconds: float = FETCH_TOTAL_S


def is_remote(url: str) -> bool:
    """Returns True if reading this URL needs a request to another host."""
    return _scheme(url) in ("http", "https")


def read_url(url: str, settings: ImageConfig, param: str, left: FetchTime | None = None) -> bytes:
    """Returns the bytes of an image. ``param`` is the field of the URL, for errors. Raises ImageError.

    ``left`` is the remaining time that the request may wait for hosts. None: ``FETCH_TOTAL_S`` seconds.
    """
    scheme = _scheme(url)
    if scheme == "data":
        return _read_data(url, settings.max_bytes, param)
    if scheme == "file":
        return _read_file(url, settings, param)
    if is_remote(url):
        return _fetch(url, settings, param, left or FetchTime())
    raise ImageError(
        f"'{param}' is {_short(url)}; it must be a data URL with base64, as in data:image/png;base64,iVBORw0...",
        param=param,
    )


def _read_data(url: str, max_bytes: int, param: str) -> bytes:
    header, comma, text = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise ImageError(f"'{param}' is a data URL without ';base64,' before its data.", param=param)
    if len(text) > -(-max_bytes // 3) * 4:
        raise _too_large(param, f"more than {max_bytes}", max_bytes)
    try:
        data = _from_base64(text)
    except (binascii.Error, ValueError) as problem:
        raise ImageError(f"'{param}' is not valid base64: {problem}.", param=param) from None
    if len(data) > max_bytes:
        raise _too_large(param, str(len(data)), max_bytes)
    return data


def _from_base64(text: str) -> bytes:
    """Returns the bytes of a text in base64. Raises ValueError if the text is not valid.

    The text is decoded in pieces, because decoding blocks all other threads: 25 ms for 8 MiB.
    """
    pieces = []
    for begin in range(0, len(text), _BASE64_CHARS):
        piece = text[begin : begin + _BASE64_CHARS]
        if begin + _BASE64_CHARS < len(text) and piece.endswith("="):
            raise ValueError("Excess data after padding")
        pieces.append(base64.b64decode(piece, validate=True))
    return b"".join(pieces)


def _read_file(url: str, settings: ImageConfig, param: str) -> bytes:
    folders = settings.allowed_folders or ()
    if not folders:
        raise ImageError(
            f"'{param}' is a file: URL, and this server reads no files; send the image as a data URL, or let the "
            "operator allow its folder (image_config.allowed_folders).",
            param=param,
        )
    try:
        parts = urlsplit(url)
        path = os.path.realpath(os.fsdecode(unquote_to_bytes(parts.path)))
    except ValueError as problem:  # the URL has a zero byte or a single bracket, for example
        raise ImageError(f"'{param}' is not a valid file: URL: {problem}.", param=param) from None
    allowed = [os.path.realpath(folder) for folder in folders]
    if parts.netloc not in ("", "localhost") or not any(Path(path).is_relative_to(folder) for folder in allowed):
        raise ImageError(
            f"'{param}' names a file outside the folders that this server may read (image_config.allowed_folders).",
            param=param,
        )
    try:
        # These flags open the resolved path without following links, and without waiting if it is a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as problem:
        raise ImageError(f"'{param}' names a file that cannot be read: {problem.strerror}.", param=param) from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise ImageError(f"'{param}' does not name a file.", param=param)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(settings.max_bytes + 1) if found.st_size <= settings.max_bytes else b""
    if found.st_size > settings.max_bytes or len(data) > settings.max_bytes:
        raise _too_large(param, str(max(found.st_size, len(data))), settings.max_bytes)
    return data


def _fetch(url: str, settings: ImageConfig, param: str, left: FetchTime) -> bytes:
    """Downloads an image from an allowed host. Follows no redirects, and uses no proxies or passwords of this machine.
    """
    request, host = _prepared(url) if settings.allowed_hosts else (None, "")
    if request is None or host not in {each.lower() for each in settings.allowed_hosts or ()}:
        raise ImageError(
            f"'{param}' names the host {_short(host)}, from which this server reads no images; send the image as a "
            "data URL, or let the operator allow the host (image_config.allowed_hosts).",
            param=param,
        )
    import requests

    from llm_serving.images.deadline import DeadlineAdapter

    begin = time.monotonic()
    # The adapter is used without a ``requests.Session``, which would read the whole body of a redirect.
    with closing(DeadlineAdapter(left.seconds)) as adapter:
        try:
            timeout = max(min(FETCH_TIMEOUT_S, left.seconds), 0.001)
            with adapter.send(request, stream=True, timeout=timeout, verify=True, proxies={}) as response:
                if response.status_code != 200:
                    raise ImageError(
                        f"'{param}': the host {_short(host)} returned the status {response.status_code}; the image "
                        "must be at this URL itself, without a redirect.",
                        param=param,
                    )
                data = _received(response, settings.max_bytes, param)
        except (requests.RequestException, OSError, ValueError) as problem:
            if not adapter.has_expired:
                raise ImageError(f"'{param}' cannot be read: {type(problem).__name__}.", param=param) from None
        finally:
            left.seconds -= time.monotonic() - begin
        if adapter.has_expired:
            late = f"'{param}' did not arrive within {FETCH_TOTAL_S:g} seconds, which all images of a request share."
            raise ImageError(late, param=param)
    return data


def _prepared(url: str) -> tuple[requests.PreparedRequest | None, str]:
    """Returns the prepared request for a URL, and the host to which it goes. Returns (None, "") for a URL that is
    refused.

    URL libraries disagree about the host of ``http://a\\@b/``. So URLs with a backslash, white space or unprintable
    characters are refused. The host is read from the prepared URL, because that is the URL that will be used.
    """
    if "\\" in url or any(char.isspace() or not char.isprintable() for char in url):
        return None, ""
    import requests  # takes long to import, and most servers never need it

    try:
        request = requests.Request("GET", url).prepare()
        parts = urlsplit(request.url or "")
        host = (parts.hostname or "").lower()
    except (requests.RequestException, ValueError):
        return None, ""
    if "@" in parts.netloc or request.headers.get("Authorization") is not None:
        return None, ""
    return request, host


def _received(response: requests.Response, max_bytes: int, param: str) -> bytes:
    pieces, size = [], 0
    for piece in response.iter_content(_PIECE_BYTES):
        size += len(piece)
        if size > max_bytes:
            raise _too_large(param, f"more than {max_bytes}", max_bytes)
        pieces.append(piece)
    return b"".join(pieces)


def _scheme(url: str) -> str:
    # Reads only the beginning of the URL, because a data URL may have megabytes and the event loop calls this function.
    return url[:_MAX_SCHEME_CHARS].partition(":")[0].lower()


def _too_large(param: str, size: str, limit: int) -> ImageError:
    return ImageError(
        f"'{param}' has {size} bytes; the maximum is {limit} (image_config.max_bytes). Send a smaller image.",
        param=param,
        code="image_too_large",
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "...")
