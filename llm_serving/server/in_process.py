"""Calls the handler of an endpoint without HTTP: JSON in, JSON out, and errors as exceptions.

A program without a socket gets the same checks, prompts and tokens as a client of the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import Message, Scope

from llm_serving.server.generation.sequences import GENERATION, Generation
from llm_serving.server.http.protocol import RECEIVED_AT
from llm_serving.server.models.lookup import release_lease
from llm_serving.server.state import Handler, ServerState


class App(Protocol):
    """The part of the application that handlers use."""

    @property
    def state(self) -> ServerState: ...


async def call_handler(
    app: App,
    handler: Handler,
    path: str,
    body: bytes,
    *,
    headers: Sequence[tuple[bytes, bytes]] = (),
    more: Mapping[str, Any] | None = None,
) -> bytes:
    """Calls ``handler`` with a POST of the JSON ``body`` and returns the body of its response.

    ``path`` is the path of the endpoint. ``headers`` are further headers, with names in lower case. ``more`` are
    further members of the ASGI scope, for example the ``Visit`` of an API key. If the request asks for a stream, the
    result is the text of all its events. If the call is cancelled, its sequences are aborted. Raises LLMServingError if
    the handler raises it.
    """
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), *headers],
        "client": None,
        "app": app,
        RECEIVED_AT: time.monotonic(),
        **(more or {}),
    }
    exchange = _Exchange(body)
    try:
        response = await handler(app.state, Request(scope, exchange.receive, exchange.send))
        await response(scope, exchange.receive, exchange.send)
        return b"".join(exchange.parts)
    finally:
        generation: Generation | None = scope.pop(GENERATION, None)
        if generation is not None:
            generation.close(time.monotonic())
        release_lease(scope)


class _Exchange:
    """The functions ``receive`` and ``send`` of one ASGI call: they pass the request's body, and keep the response."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.parts: list[bytes] = []

    async def receive(self) -> Message:
        """Returns the body. Further calls wait until they are cancelled, because there is no connection to close."""
        if self._body is None:
            await asyncio.get_running_loop().create_future()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.parts.append(message.get("body", b""))
