"""Reads JSON request bodies, with limits on size, time and depth, and makes JSON responses."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import orjson
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from llm_serving.formats.small_files import no_duplicate_keys
from llm_serving.registry.freeing import LargeBodies
from llm_serving.server.errors import (
    BodyTimeoutError,
    ClientGoneError,
    InvalidJSONError,
    MediaTypeError,
    PayloadTooLargeError,
    UnavailableError,
)
from llm_serving.server.fields.validation import RequestModel, clip, request_error
from llm_serving.server.generation.work import off_loop
from llm_serving.server.http.json_pieces import PiecesResponse, encode_in_pieces
from llm_serving.server.http.json_structure import count_keys, structure_of
from llm_serving.server.limits import (
    BODY_TIMEOUT_S,
    INLINE_BODY_BYTES,
    INLINE_ITEMS,
    MAX_JSON_DEPTH,
    MAX_JSON_OBJECTS,
    MAX_JSON_VALUES,
)

ModelT = TypeVar("ModelT", bound=RequestModel)

DRAIN_TIMEOUT_S = 1.0
"""Maximum seconds to read the rest of a refused body, so that the client can read the response."""
DRAIN_BYTES = 32 * 1024 * 1024
"""Maximum bytes that are read from the rest of a refused body."""
PARSED_BYTES = 20
"""Maximum memory that orjson takes for each byte of a body: a buffer of 12 bytes, strings, and the text of an error."""


async def read_request(model: type[ModelT], request: Request, max_bytes: int) -> ModelT:
    """Reads the JSON body of a request as an object of the pydantic class ``model``.

    Raises RequestError (status 400, 408, 413 or 415), or ClientGoneError. NaN, Infinity, numbers beyond a double, text
    that is not UTF-8 and objects with a repeated key are refused.
    """
    _check_headers(request)
    state: BodyCounter = request.scope["app"].state
    counted = _CountedBytes(state)
    try:
        body = await _read_in_time(request, max_bytes, counted)
        if len(body) <= INLINE_BODY_BYTES:
            return _parse(model, body)
        return await asyncio.get_running_loop().run_in_executor(None, _parse, model, body)
    finally:
        counted.release()


class BodyCounter(Protocol):
    """The part of the application's state that counts the bytes of request bodies."""

    settings: Any
    body_bytes: int
    large_bodies: LargeBodies


class _CountedBytes:
    """Counts the bytes of one request body in the total of all bodies that are being read or parsed."""

    def __init__(self, state: BodyCounter) -> None:
        self._state = state
        self._size = 0

    def add(self, size: int) -> None:
        """Counts bytes that have arrived. Raises UnavailableError if all bodies together are too large."""
        limit = self._state.settings.max_body_bytes_in_flight
        if self._state.body_bytes + size > limit:
            raise UnavailableError(
                f"The request bodies that the server is reading have more than {limit} bytes together "
                "(serving_config.max_body_bytes_in_flight); try again.",
                "overloaded",
            )
        self._state.body_bytes += size
        self._size += size

    def release(self) -> None:
        self._state.body_bytes -= self._size
        self._state.large_bodies.note(self._size)
        self._size = 0


def json_response(content: Any, request_id: str | None = None, status: int = 200) -> Response:
    """Returns ``content`` as a JSON response."""
    headers = {} if request_id is None else {"X-Request-Id": request_id}
    return Response(orjson.dumps(content), status, headers, "application/json")


async def whole_response(generation_id: str, num_items: int, build: Callable[[], object]) -> Response | PiecesResponse:
    """Returns a JSON response with the content that ``build`` returns.

    ``num_items`` is the number of tokens and log-probabilities in the content. If it is large, another thread calls
    ``build`` and encodes the content.
    """
    pieces = await off_loop(num_items, lambda: encode_in_pieces(build()))
    headers = {"X-Request-Id": generation_id}
    if num_items > INLINE_ITEMS:
        return PiecesResponse(pieces, headers)
    return Response(b"".join(pieces), 200, headers, "application/json")


def _check_headers(request: Request) -> None:
    """Raises MediaTypeError unless the headers declare the body as JSON.

    This also protects against other web sites. A browser lets any site send a form to this server without a preflight
    request, but a form cannot declare JSON.
    """
    kind, _, options = request.headers.get("content-type", "").partition(";")
    if kind.strip().lower() != "application/json":
        given = f"The content type is {clip(kind.strip())!r}" if kind.strip() else "The request has no content type"
        raise MediaTypeError(f"{given}; send 'Content-Type: application/json'.")
    charset = re.search(r"charset\s*=\s*\"?([\w.-]+)", options, re.IGNORECASE)
    if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        raise MediaTypeError(f"The charset is {clip(charset[1])!r}; send JSON as UTF-8.")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise MediaTypeError(f"The content encoding is {clip(encoding)!r}; send the body uncompressed.")


async def _read_in_time(request: Request, max_bytes: int, counted: _CountedBytes) -> bytes:
    """Reads the body within ``BODY_TIMEOUT_S``. A timer is cheaper than ``asyncio.wait_for``, which starts a task."""
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
        return await _read(request, max_bytes, counted)
    except asyncio.CancelledError:
        if not is_late:
            raise
        raise BodyTimeoutError(f"The request body did not arrive within {BODY_TIMEOUT_S:g} seconds.") from None
    finally:
        timer.cancel()


async def _read(request: Request, max_bytes: int, counted: _CountedBytes) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        if request.headers.get("expect", "").lower() != "100-continue":
            await drain_body(request.receive)
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
            await drain_body(request.receive)
            raise _too_large(f"more than {max_bytes} bytes", max_bytes)
        counted.add(len(chunk))
        chunks.append(chunk)
        if not message.get("more_body"):
            return b"".join(chunks)


def _too_large(size: str, max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"The request body has {size}; the maximum is {max_bytes} bytes (serving_config.max_body_bytes)."
    )


async def drain_body(receive: Receive) -> None:
    """Reads and discards the rest of a refused body for a short time.

    Many clients read the response only after they have sent the whole body.
    """

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


def _parse(model: type[ModelT], body: bytes) -> ModelT:
    """Parses a JSON text and returns it as an object of ``model``.

    It first counts the values, keys and brackets, and refuses too many before the JSON parser runs.
    """
    structure = structure_of(body)
    if structure.num_values > MAX_JSON_VALUES:
        raise _too_many("values", structure.num_values, MAX_JSON_VALUES)
    if structure.num_strings > MAX_JSON_OBJECTS:
        raise _too_many("strings", structure.num_strings, MAX_JSON_OBJECTS)
    if structure.num_containers > MAX_JSON_OBJECTS:
        raise _too_many("objects and lists", structure.num_containers, MAX_JSON_OBJECTS)
    if structure.is_deeper_than(MAX_JSON_DEPTH):
        raise InvalidJSONError(f"The request body is nested deeper than {MAX_JSON_DEPTH} levels.")
    _check_memory(len(body))
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as reason:
        raise InvalidJSONError(_problem(body, reason)) from None
    if not isinstance(value, dict):
        raise InvalidJSONError(f"The request body must be a JSON object, not {_kind(value)}.")
    if count_keys(value) != structure.num_keys:
        raise InvalidJSONError(f"The request body is ambiguous: it has a {_repeated_key(body)}.")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise request_error(error, model) from None


def _problem(body: bytes, reason: orjson.JSONDecodeError) -> str:
    """Returns a message about a body that orjson could not parse for ``reason``.

    orjson reports every byte that is not UTF-8 as line 1, column 1, so this function searches for the first one.
    """
    if not body:
        return "The request body is empty; send a JSON object."
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"The request body is not UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}."
    return f"The request body is not valid JSON: {reason}"


def _check_memory(num_bytes: int) -> None:
    """Raises MemoryError if there is too little memory for a body. Without the check, orjson would end the process.

    The check allocates a large ``bytes`` object of zeros. This is fast, because it reserves addresses and writes
    nothing. A ``bytearray`` would write every byte.
    """
    bytes(PARSED_BYTES * num_bytes)


def _too_many(what: str, number: int, limit: int) -> InvalidJSONError:
    return InvalidJSONError(f"The request body has {number} {what}; the maximum is {limit}. Send several requests.")


def _repeated_key(body: bytes) -> str:
    """Returns a message that names the repeated key of a body. orjson keeps the last value and reports nothing."""
    try:
        json.loads(body, object_pairs_hook=no_duplicate_keys)
    except ValueError as reason:
        return str(reason)
    raise AssertionError("no key of the body repeats")


def _kind(value: object) -> str:
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return kinds.get(type(value), type(value).__name__)
