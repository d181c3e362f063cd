"""Server-sent events, written straight to the connection: one write for each piece of the engine, when it comes."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from starlette.types import Receive, Scope, Send

from llm_serving.engine.outputs import MERGE_AT, merge_outputs
from llm_serving.request import RequestOutput
from llm_serving.server.choices import Choice
from llm_serving.server.errors import ClientGoneError, ErrorReply, error_reply, note_error
from llm_serving.server.generation import Generation
from llm_serving.server.http_protocol import STREAM_CHANNEL, Header, StreamChannel

__all__ = ["EventFormat", "EventStream"]

_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class EventFormat(Protocol):
    """How an API writes its events, each in the form ``data: ...\\n\\n``. Kept for one stream."""

    def events(self, choice: Choice, piece: RequestOutput, /) -> bytes:
        """The events of a piece; empty when there is nothing to tell."""

    def last(self) -> bytes:
        """What follows the last piece of the last choice."""

    def error(self, reply: ErrorReply, /) -> bytes:
        """An error after the stream has begun."""


class EventStream:
    """A response that is written by the pieces of ``generation`` as they come.

    Nothing is sent before the first event is there, so a request the engine refuses still gets its own status.
    Later errors are one more event. The status sent is in ``status_code``. While the socket takes nothing, pieces are
    merged: a client that does not read costs one piece a choice.
    """

    def __init__(self, generation: Generation, events: EventFormat) -> None:
        self._generation = generation
        self._format = events
        self._headers = (*_HEADERS, (b"x-request-id", generation.request_id.encode("ascii")))
        self._channel: StreamChannel | None = None
        self._over: asyncio.Future[None] | None = None
        self._started = False
        self._num_open = len(generation.choices)
        self._backlog: dict[int, list[RequestOutput]] = {}
        self._unsent: set[int] = set()
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, state = self._generation, self._generation.state
        channel = self._channel = scope[STREAM_CHANNEL]
        self._over = asyncio.get_running_loop().create_future()
        try:
            channel.attach(self)
            with state.active.this_task():
                if not self._over.done():
                    generation.open(self, streamed=True)
                await self._over
        except ClientGoneError:
            self.status_code = 499
        except Exception as error:
            reply = error_reply(error)
            note_error(state.log, error, reply, scope["path"])
            channel.detach()
            if self._started:
                channel.write(self._held_back() + self._format.error(reply), is_last=True)
            else:
                self.status_code = reply.status
                await reply.response()(scope, receive, send)
        else:
            generation.close()  # with the last byte delivered; else the caller says when
        finally:
            channel.detach()
            self._over = None  # an error in it holds this frame: as a cycle, both would wait for the collector

    # Called by the generation

    def take(self, choice: Choice, piece: RequestOutput) -> None:
        """A piece of an answer."""
        if self._done:
            return
        if self._full:
            backlog = self._backlog.setdefault(choice.index, [])
            backlog.append(piece)
            if len(backlog) >= MERGE_AT:
                self._backlog[choice.index] = [merge_outputs(backlog)]
        else:
            self._write(choice, piece)

    def fail(self, error: Exception) -> None:
        """No more pieces come."""
        if self._over is not None and not self._over.done():
            self._over.set_exception(error)

    # Called by the channel

    def drained(self) -> None:
        """The socket has taken all: its time counts for what was written, and what was held back may go."""
        now = time.monotonic()
        for index in self._unsent:
            self._generation.delivered(index, now)
        self._unsent.clear()
        while self._backlog and not self._full and not self._done:
            index, pieces = next(iter(self._backlog.items()))
            del self._backlog[index]
            self._write(self._generation.choices[index], merge_outputs(pieces))
        self._check_over()

    def lost(self) -> None:
        """The client has closed the connection: there is nobody to write to."""
        self.fail(ClientGoneError())

    @property
    def _full(self) -> bool:
        return self._channel is not None and self._channel.is_full

    @property
    def _done(self) -> bool:
        return self._over is None or self._over.done()

    def _write(self, choice: Choice, piece: RequestOutput) -> None:
        channel = self._channel
        if channel is None:
            raise AssertionError("a piece came before the stream was open")
        data = self._format.events(choice, piece)
        is_last = False
        if piece.finish_reason is not None:
            self._num_open -= 1
            is_last = self._num_open == 0
            if is_last:
                data += self._format.last()
        if data:
            now = time.monotonic()  # not after: the client that the write wakes may run before this thread goes on
            if self._started:
                channel.write(data, is_last=is_last)
            else:
                self._started = True
                channel.start(self._headers, data, is_last=is_last)
            if channel.is_full:
                self._unsent.add(choice.index)
            else:
                self._generation.delivered(choice.index, now)
        if is_last:
            self._check_over()

    def _held_back(self) -> bytes:
        """The events of the pieces that wait for the socket."""
        choices = self._generation.choices
        return b"".join(
            self._format.events(choices[index], merge_outputs(pieces)) for index, pieces in self._backlog.items()
        )

    def _check_over(self) -> None:
        """The last byte has gone to the client."""
        if self._num_open == 0 and not self._unsent and self._over is not None and not self._over.done():
            self._over.set_result(None)
