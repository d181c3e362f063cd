"""Asks a server which model it serves."""

from __future__ import annotations

import asyncio

import msgspec

from performance.load.endpoint import Endpoint
from performance.load.http_client import Connection, ConnectionPool, request_bytes
from performance.program import ServerUnreachableError

TIMEOUT_S = 10.0


class Model(msgspec.Struct):
    id: str


class ModelList(msgspec.Struct):
    data: list[Model]


class Fetch:
    """A request whose complete response is awaited. ``answer`` returns (status, body) or raises ``ConnectionError``."""

    def __init__(self) -> None:
        self.is_over = False
        self.answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._body = b""

    def attached(self, connection: Connection, now: float) -> None:
        """Does nothing, because a fetch is never cancelled before its connection is."""

    def status(self, code: int, request_id: str | None) -> None:
        self._status = code

    def body(self, data: bytes, now: float) -> None:
        self._body += data

    def end(self, now: float) -> None:
        self.is_over = True
        if not self.answer.done():
            self.answer.set_result((self._status, self._body))

    def failed(self, kind: str, detail: str, now: float) -> None:
        self.is_over = True
        if not self.answer.done():
            self.answer.set_exception(ConnectionError(f"{kind}: {detail}"))


async def discover_model(pool: ConnectionPool, endpoint: Endpoint, headers: dict[str, str]) -> str:
    """Returns the first model of ``/v1/models``. Raises ``ServerUnreachableError`` if there is none."""
    fetch = Fetch()
    pool.send(fetch, request_bytes(endpoint, "GET", "/v1/models", b"", headers))
    try:
        status, body = await asyncio.wait_for(fetch.answer, TIMEOUT_S)
    except (ConnectionError, asyncio.TimeoutError) as error:
        reason = str(error) or f"no response within {TIMEOUT_S:g} s"
        raise ServerUnreachableError(f"{endpoint.url}/v1/models: {reason}") from error
    if status != 200:
        raise ServerUnreachableError(f"{endpoint.url}/v1/models returns {status}: name the model with --model")
    try:
        models = msgspec.json.decode(body, type=ModelList).data
    except msgspec.DecodeError as error:
        raise ServerUnreachableError(f"{endpoint.url}/v1/models: {error}: name the model with --model") from error
    if not models:
        raise ServerUnreachableError(f"{endpoint.url}/v1/models lists no model: name one with --model")
    return models[0].id
