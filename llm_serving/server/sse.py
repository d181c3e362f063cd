"""Server-sent events, written straight to the connection: one ``send`` for each piece of the engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.types import Receive, Scope, Send

from llm_serving.server.errors import ClientGoneError, ErrorReply, error_reply, note_error
from llm_serving.server.lifecycle import run_while_connected
from llm_serving.server.state import ServerState

__all__ = ["EventStream"]

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """A response whose body comes from ``events``, each already in the form ``data: ...\\n\\n``.

    Nothing is sent before the first event is there, so a request the engine refuses still gets its own status.
    Later errors are one more event, ``format_error`` of the reply. The status sent is in ``status_code``.
    """

    def __init__(
        self,
        state: ServerState,
        events: AsyncGenerator[bytes, None],
        format_error: Callable[[ErrorReply], bytes],
        request_id: str,
    ) -> None:
        self._state = state
        self._events = events
        self._format_error = format_error
        self._headers = [*_HEADERS, (b"x-request-id", request_id.encode("ascii"))]
        self._started = False
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_while_connected(self._state.active, receive, self._send_events(send))
        except ClientGoneError:
            self.status_code = 499
        except Exception as error:
            reply = error_reply(error)
            note_error(self._state.log, error, reply, scope["path"])
            if not self._started:
                self.status_code = reply.status
                await reply.response()(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": self._format_error(reply), "more_body": False})

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                if not self._started:
                    self._started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self._headers})
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
