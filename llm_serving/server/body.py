"""Reads a JSON request body, bounded in size, time and depth while it arrives."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import orjson
from starlette.requests import Request
from starlette.types import Receive

from llm_serving.server.errors import (
    BodyTimeoutError,
    ClientGoneError,
    InvalidJSONError,
    MediaTypeError,
    PayloadTooLargeError,
)
from llm_serving.server.limits import BODY_TIMEOUT_S, MAX_JSON_DEPTH
from llm_serving.server.validation import clip

__all__ = ["read_json_object"]

DRAIN_TIMEOUT_S = 1.0
DRAIN_BYTES = 32 * 1024 * 1024

_AS_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object.

    NaN, Infinity, numbers beyond a double, lone surrogates and anything that is not UTF-8 are refused.
    Raises RequestError (400, 408, 413, 415), or ClientGoneError.
    """
    _check_headers(request)
    body = await _read_in_time(request, max_bytes)
    _check_depth(body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as reason:
        raise InvalidJSONError(f"The request body is not valid JSON: {reason}") from None
    if not isinstance(value, dict):
        raise InvalidJSONError(f"The request body must be a JSON object, not {_kind(value)}.")
    return value


def _check_headers(request: Request) -> None:
    """Only a declared JSON body is read: a form on a foreign web page cannot declare one."""
    kind, _, options = request.headers.get("content-type", "").partition(";")
    if kind.strip().lower() != "application/json":
        raise MediaTypeError(
            f"The content type is {clip(kind.strip()) or 'not given'!r}; send 'Content-Type: application/json'."
        )
    charset = re.search(r"charset\s*=\s*\"?([\w.-]+)", options, re.IGNORECASE)
    if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        raise MediaTypeError(f"The charset is {clip(charset[1])!r}; JSON is sent as UTF-8.")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise MediaTypeError(f"The content encoding is {clip(encoding)!r}; send the body uncompressed.")


async def _read_in_time(request: Request, max_bytes: int) -> bytes:
    """``asyncio.wait_for`` without its task: nearly always the whole body is there already."""
    task = asyncio.current_task()
    if task is None:
        raise AssertionError("a body is read by a task")
    is_late = False

    def too_late() -> None:
        nonlocal is_late
        is_late = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(BODY_TIMEOUT_S, too_late)
    try:
        return await _read(request, max_bytes)
    except asyncio.CancelledError:
        if not is_late:
            raise
        raise BodyTimeoutError(f"The request body did not arrive within {BODY_TIMEOUT_S:g} seconds.") from None
    finally:
        timer.cancel()


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        if request.headers.get("expect", "").lower() != "100-continue":
            await _drain(request.receive)
        raise _too_large(f"{int(declared)} bytes", max_bytes)
    chunks = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            await _drain(request.receive)
            raise _too_large(f"more than {max_bytes} bytes", max_bytes)
        chunks.append(chunk)
        if not message.get("more_body"):
            return b"".join(chunks)


def _too_large(size: str, max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"The request body has {size}; at most {max_bytes} bytes (serving_config.max_body_bytes) are read."
    )


async def _drain(receive: Receive) -> None:
    """Throws away what is still coming, for a moment: a client that is still sending does not read the answer."""

    async def discard() -> None:
        size = 0
        while size < DRAIN_BYTES:
            message = await receive()
            size += len(message.get("body", b""))
            if not message.get("more_body"):
                return

    try:
        await asyncio.wait_for(discard(), DRAIN_TIMEOUT_S)
    except asyncio.TimeoutError:
        return


def _check_depth(body: bytes) -> None:
    """Refuses deep nesting before it is built. Most bodies have too few brackets to be looked at twice.

    Each pass takes away the innermost level; a body whose brackets do not match is left to the parser.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return
    outside_strings = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    brackets = b"".join(outside_strings).translate(_AS_SQUARE, _NO_BRACKETS)
    for _ in range(MAX_JSON_DEPTH):
        brackets = brackets.replace(b"[]", b"")
    if brackets and brackets.count(b"[") == brackets.count(b"]"):
        raise InvalidJSONError(f"The request body is nested deeper than {MAX_JSON_DEPTH} levels.")


def _kind(value: object) -> str:
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return kinds.get(type(value), type(value).__name__)
