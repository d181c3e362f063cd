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
from llm_serving.server.http.protocol import STREAM_CHANNEL, Header, StreamChannel
from llm_serving.server.limits import INLINE_ITEMS

_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class EventFormat(Protocol):
    """Formats the pieces of one stream as an API's events. An event ends with an empty line."""

    def events(self, choice: Choice, piece: RequestOutput, /) -> bytes:
        """Returns the events of a piece of ``choice``. Empty if the client needs no event for the piece."""

    def last(self) -> bytes:
        """Returns the events that end the stream, after all choices have ended."""

    def error(self, reply: ErrorReply, /) -> bytes:
        """Returns the event of an error that happened after the stream began."""


class _Backlog:
    """The pieces of a choice that wait until the socket accepts data.

    Waiting pieces are merged into larger ones, up to a limit, so that formatting one takes little time.
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


class EventStream:
    """A streamed response. The engine passes each piece of text to ``push``, which writes the piece to the socket.

    Nothing is sent before the first event, so an error before it still gets its own HTTP status. A later error becomes
    an event. While the client is too slow, up to ``MERGE_AT`` pieces of a choice are merged into one.
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
            note_error(state.log, error, reply, scope["path"], generation.request_id)
            channel.detach()
            if self._started:
                await self._write_held_back(channel)
                channel.write(self._format.error(reply), is_last=True)
            else:
                self.status_code = reply.status
                await reply.response(generation.request_id)(scope, receive, send)
        else:
            # Close the generation now, so that it ends at the time of the last byte. After an error, ``app.py`` closes
            # the generation.
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
        elif self._is_full or self._backlog:
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
        channel = self._channel
        if channel is None:
            raise AssertionError("a piece arrived before the stream was open")
        data = self._format.events(self._generation.choices[index], piece)
        is_last = False
        if piece.finish_reason is not None:
            self._num_open -= 1
            is_last = self._num_open == 0
            if is_last:
                data += self._format.last()
        if data:
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
        if is_last:
            self._check_over()

    def _write_backlog(self) -> None:
        """Writes the kept pieces while the socket accepts data.

        After every ``INLINE_ITEMS`` tokens and log-probabilities, lets other tasks run.
        """
        num_items = 0
        while self._backlog and not self._is_full and not self._is_over:
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

    async def _write_held_back(self, channel: StreamChannel) -> None:
        """Writes the pieces that were kept because the socket accepted no data. The response must be over.

        After every ``INLINE_ITEMS`` tokens and log-probabilities, lets other tasks run.
        """
        num_items = 0
        for index, kept in self._backlog.items():
            for piece in kept.rest():
                if data := self._format.events(self._generation.choices[index], piece):
                    channel.write(data)
                num_items += self._num_items(index, piece)
                if num_items > INLINE_ITEMS:
                    num_items = 0
                    await asyncio.sleep(0)

    def _num_items(self, index: int, piece: RequestOutput) -> int:
        """Returns the number of tokens and log-probabilities in a piece of choice ``index``."""
        return len(piece.token_ids) + len(piece.logits) * self._generation.choices[index].sampling.top_logits

    def _check_over(self) -> None:
        """Ends the response if the socket has accepted the last piece of every choice."""
        if self._num_open == 0 and not self._unsent and self._over is not None and not self._over.done():
            self._over.set_result(None)
