"""Streamed responses as server-sent events. Each piece of text is written directly to the client's socket."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from starlette.types import Receive, Scope, Send

from llm_serving.engine.outputs import MERGE_AT, merge_outputs
from llm_serving.request import RequestOutput
from llm_serving.server.error_replies import ErrorReply, error_reply, note_error
from llm_serving.server.errors import ClientGoneError
from llm_serving.server.generation.sampling import Choice
from llm_serving.server.generation.sequences import Generation
from llm_serving.server.http.json_pieces import joined
from llm_serving.server.http.protocol import STREAM_CHANNEL, Header, StreamChannel
from llm_serving.server.limits import INLINE_ITEMS

_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


Events = bytes | list[bytes]
"""One or more events. Events that may be long are a list of pieces, which are written in parts of ``SEND_BYTES``."""


class EventFormat(Protocol):
    """Formats the pieces of one stream as an API's events. An event ends with an empty line."""

    def events(self, choice: Choice, piece: RequestOutput, /) -> Events:
        """Returns the events of a piece of ``choice``. Empty if the client needs no event for the piece."""

    def last(self) -> Events:
        """Returns the events that end the stream, after all choices have ended."""

    def error(self, reply: ErrorReply, /) -> Events:
        """Returns the event of an error that happened after the stream began, never empty."""


class _Backlog:
    """The pieces of a choice that wait until the socket accepts data.

    Up to ``MERGE_AT`` waiting pieces are merged into one. A larger piece would take too long to format.
    """

    def __init__(self) -> None:
        self._merged: deque[RequestOutput] = deque()
        self._pieces: list[RequestOutput] = []

    def __len__(self) -> int:
        return len(self._merged) + len(self._pieces)

    def add(self, piece: RequestOutput) -> None:
        self._pieces.append(piece)
        if len(self._pieces) >= MERGE_AT:
            self._merged.append(merge_outputs(self._pieces))
            self._pieces = []

    def take(self) -> RequestOutput:
        """Removes the oldest pieces and returns them merged into one. The backlog must not be empty."""
        if self._merged:
            return self._merged.popleft()
        pieces, self._pieces = self._pieces, []
        return merge_outputs(pieces)

    def rest(self) -> Iterator[RequestOutput]:
        """Removes and returns all pieces."""
        while self:
            yield self.take()


class _Parts:
    """Events that are written in several parts."""

    def __init__(self, index: int, pieces: list[bytes], *, is_last: bool) -> None:
        """``index`` is the number of the choice that the events belong to. ``is_last``: the events end the response."""
        self.index = index
        self._is_last = is_last
        self._parts = joined(pieces)
        self._next = next(self._parts, b"")

    def __len__(self) -> int:
        """Returns the number of bytes of the next part, which is 0 after the last part."""
        return len(self._next)

    def take(self) -> tuple[bytes, bool]:
        """Returns the next part, and whether it ends the response."""
        part, self._next = self._next, next(self._parts, b"")
        return part, self._is_last and not self._next


class EventStream:
    """A streamed response. The engine passes each piece of text to ``push``, which writes the piece to the socket.

    The HTTP status is sent together with the first event. So an error before the first event still gets its own status.
    A later error becomes an event. While the client is too slow, up to ``MERGE_AT`` pieces of a choice are merged into
    one.
    """

    def __init__(self, generation: Generation, events: EventFormat) -> None:
        self._generation = generation
        self._format = events
        self._headers = (*_HEADERS, (b"x-request-id", generation.request_id.encode("ascii")))
        self._channel: StreamChannel | None = None
        self._over: asyncio.Future[None] | None = None
        self._started = False
        self._num_open = len(generation.choices)
        self._backlog: dict[int, _Backlog] = {}
        self._unsent: set[int] = set()
        self._parts: _Parts | None = None
        """The events of the present piece that are not written yet."""
        self._is_complete = False
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, state = self._generation, self._generation.state
        channel = self._channel = scope[STREAM_CHANNEL]
        self._over = asyncio.get_running_loop().create_future()
        try:
            channel.attach(self)
            with state.active.this_task():
                if not self._over.done():
                    await generation.open(self, streamed=True)
                await self._over
        except ClientGoneError:
            self.status_code = 499
        except Exception as error:
            reply = error_reply(error, scope["path"])
            path, is_logged = scope["path"], generation.is_refused
            note_error(state.log, error, reply, path, generation.request_id, is_logged=is_logged)
            channel.detach()
            if self._started:
                await self._write_parts(channel)
                if not self._is_complete:
                    await self._write_held_back(channel)
                    self._parts = _Parts(0, _pieces(self._format.error(reply)), is_last=True)
                    await self._write_parts(channel)
            else:
                self.status_code = reply.status
                await reply.response(generation.request_id)(scope, receive, send)
        else:
            # Close the generation now, so that the time of the last byte is recorded as its end. After an error,
            # ``app.py`` closes the generation.
            generation.close()
        finally:
            channel.detach()
            self._over = None  # breaks a reference cycle: an error in the asyncio future refers to this frame

    # The following methods are those of ``PieceSink``, which the engine calls.

    def push(self, index: int, piece: RequestOutput) -> None:
        """Writes a piece of choice ``index``, or keeps it while the socket accepts no data."""
        if self._is_over:
            return
        if piece.finish_reason is not None and (failure := self._generation.note_end(index, piece)) is not None:
            self._end(failure)
        elif self._is_full or self._parts or self._backlog:
            self._backlog.setdefault(index, _Backlog()).add(piece)
        else:
            try:
                self._write(index, piece)
            except Exception as error:  # an error while formatting ends only this response
                self._end(error)

    def fail(self, error: Exception) -> None:
        """Ends the response because the engine refused a choice."""
        self._generation.note_refusal(error)
        self._end(error)

    # The following methods are those of ``ChannelUser``, which the connection calls.

    def drained(self) -> None:
        """Reports the written pieces as delivered, and writes the kept pieces, because the socket accepts data again.
        """
        now = time.monotonic()
        for index in self._unsent:
            self._generation.delivered(index, now)
        self._unsent.clear()
        self._write_backlog()

    def lost(self) -> None:
        """Ends the response because the client has closed the connection."""
        self._end(ClientGoneError())

    @property
    def _is_full(self) -> bool:
        return self._channel is not None and self._channel.is_full

    @property
    def _is_over(self) -> bool:
        return self._over is None or self._over.done()

    def _end(self, error: Exception) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_exception(error)

    def _write(self, index: int, piece: RequestOutput) -> None:
        events = self._format.events(self._generation.choices[index], piece)
        is_last = False
        if piece.finish_reason is not None:
            self._num_open -= 1
            is_last = self._num_open == 0
            if is_last:
                events = _together(events, self._format.last())
        if isinstance(events, list):
            self._parts = _Parts(index, events, is_last=is_last)
            self._write_part()
        elif events:
            self._send(index, events, is_last=is_last)
        if is_last:
            self._check_over()

    def _write_part(self) -> None:
        """Writes the next part of the present events. Lets other tasks run before it writes the part that follows."""
        parts = self._parts
        if parts:
            data, is_last = parts.take()
            self._send(parts.index, data, is_last=is_last)
        if not parts:
            self._parts = None
        elif not self._is_full:
            asyncio.get_running_loop().call_soon(self._write_backlog)

    def _send(self, index: int, data: bytes, *, is_last: bool) -> None:
        channel = self._channel
        if channel is None:
            raise AssertionError("a piece arrived before the stream was open")
        self._is_complete = is_last
        # Read the clock before the write, because the client may get the data before this thread continues.
        now = time.monotonic()
        if self._started:
            channel.write(data, is_last=is_last)
        else:
            self._started = True
            channel.start(self._headers, data, is_last=is_last)
        if channel.is_full:
            self._unsent.add(index)
        else:
            self._generation.delivered(index, now)

    def _write_backlog(self) -> None:
        """Writes the kept parts and pieces while the socket accepts data.

        After every ``INLINE_ITEMS`` tokens and log-probabilities, and after every part, lets other tasks run.
        """
        num_items = 0
        if self._parts and not self._is_full and not self._is_over:
            self._write_part()
        while self._backlog and not self._parts and not self._is_full and not self._is_over:
            if num_items > INLINE_ITEMS:
                asyncio.get_running_loop().call_soon(self._write_backlog)
                return
            index, kept = next(iter(self._backlog.items()))
            piece = kept.take()
            if not kept:
                del self._backlog[index]
            num_items += self._num_items(index, piece)
            try:
                self._write(index, piece)
            except Exception as error:  # an error while formatting ends only this response
                self._end(error)
        self._check_over()

    async def _write_parts(self, channel: StreamChannel) -> None:
        """Writes all parts of the present events, because the event of an error must not follow a part of an event.

        Lets other tasks run between the parts.
        """
        while self._parts:
            data, self._is_complete = self._parts.take()
            channel.write(data, is_last=self._is_complete)
            await asyncio.sleep(0)

    async def _write_held_back(self, channel: StreamChannel) -> None:
        """Writes the pieces that were kept because the socket accepted no data. The caller then writes the event of an
        error.

        After every ``INLINE_ITEMS`` tokens and log-probabilities, lets other tasks run.
        """
        num_items = 0
        for index, kept in self._backlog.items():
            for piece in kept.rest():
                events = self._format.events(self._generation.choices[index], piece)
                self._parts = _Parts(index, _pieces(events), is_last=False)
                await self._write_parts(channel)
                num_items += self._num_items(index, piece)
                if num_items > INLINE_ITEMS:
                    num_items = 0
                    await asyncio.sleep(0)

    def _num_items(self, index: int, piece: RequestOutput) -> int:
        """Returns the number of tokens and log-probabilities in a piece of choice ``index``."""
        return len(piece.token_ids) + len(piece.logits) * self._generation.choices[index].sampling.top_logits

    def _check_over(self) -> None:
        """Ends the response if the socket has accepted the last piece of every choice."""
        is_written = self._num_open == 0 and not self._parts and not self._unsent
        if is_written and self._over is not None and not self._over.done():
            self._over.set_result(None)


def _pieces(events: Events) -> list[bytes]:
    return [events] if isinstance(events, bytes) else events


def _together(first: Events, second: Events) -> Events:
    if isinstance(first, bytes) and isinstance(second, bytes):
        return first + second
    return _pieces(first) + _pieces(second)
