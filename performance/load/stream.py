"""Reads one streamed response, and records the times of its events, token counts, and any failure."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from performance.load.apis import Api, error_text
from performance.load.http_client import Connection

MAX_EVENT_BYTES = 4 * 1024 * 1024
"""Maximum size of an event of a stream."""
MAX_ERROR_BYTES = 4096
"""Maximum bytes of an error's body that are kept."""
BAD_ENDINGS = ("abort", "error")


@dataclass(slots=True)
class RequestRecord:
    """The history of a request. Times are seconds on the clock of ``perf_counter``."""

    index: int
    due: float
    sent: float
    """Time at which the first byte was written: ``due``, plus the client's delay and the setup of a connection."""
    piece_times: array[float] = field(default_factory=lambda: array("d"))
    """Arrival times of the streamed pieces that contain output."""
    end: float | None = None
    """Time at which the response was complete or had failed. None while the request runs."""
    http_status: int = 0
    prompt_tokens: int | None = None
    output_tokens: int = 0
    tokens_known: bool = False
    """True if the server reported the number of tokens or their ids."""
    finish_reason: str | None = None
    request_id: str | None = None
    """The id that the server gave the request and uses in its log. None if the server stated no id.

    The id comes from the header X-Request-ID or from the response.
    """
    text: str | None = None
    """The text of the response. None if ``keep_text`` was not set."""
    failure: str | None = None
    """Kind of the failure, for example ``timeout``. None if the request did not fail."""
    detail: str | None = None

    @property
    def ok(self) -> bool:
        return self.end is not None and self.failure is None


class StreamExchange:
    """Receives a response, fills the request's record, and calls ``on_over`` once at the end."""

    def __init__(
        self,
        api: Api,
        record: RequestRecord,
        on_over: Callable[[StreamExchange], None],
        *,
        keep_text: bool = False,
    ) -> None:
        self.record = record
        self.is_over = False
        self._api = api
        self._on_over = on_over
        self._connection: Connection | None = None
        self._tail = b""
        self._error_body = b""
        self._token_ids = 0
        self._done_at: float | None = None
        self._error: str | None = None
        self._texts: list[str] | None = [] if keep_text else None

    def attached(self, connection: Connection, now: float) -> None:
        self._connection = connection
        self.record.sent = now

    def status(self, code: int, request_id: str | None) -> None:
        self.record.http_status = code
        self.record.request_id = request_id

    def body(self, data: bytes, now: float) -> None:
        if self.record.http_status != 200:
            self._error_body += data[: MAX_ERROR_BYTES - len(self._error_body)]
            return
        *lines, self._tail = (self._tail + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)
        if len(self._tail) > MAX_EVENT_BYTES:
            self.cancel("bad stream", f"an event of more than {MAX_EVENT_BYTES} bytes", now)

    def end(self, now: float) -> None:
        """Ends the record when the HTTP response is complete. Decides whether the request succeeded."""
        record = self.record
        if record.http_status != 200:
            self.failed(f"http {record.http_status}", _error_body_text(self._error_body), now)
        elif self._error is not None:
            self.failed("error in stream", self._error, now)
        elif record.finish_reason in BAD_ENDINGS:
            self.failed(f"ended by {record.finish_reason}", "", now)
        elif record.finish_reason is None and self._done_at is None:
            self.failed("incomplete", "the stream ended without a finish reason", now)
        elif not record.piece_times:
            self.failed("empty answer", "the stream ended without a piece of text", now)
        else:
            self._over(self._done_at or now)

    def failed(self, kind: str, detail: str, now: float) -> None:
        if self.is_over:
            return
        self.record.failure = kind
        self.record.detail = detail
        self._over(now)

    def cancel(self, kind: str, detail: str, now: float) -> None:
        """Records the request as failed, and closes the connection, so that the server aborts the request."""
        if self._connection is not None and not self.is_over:
            self._connection.abandon()
        self.failed(kind, detail, now)

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self._done_at = now
            return
        try:
            piece = self._api.read(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.cancel("bad stream", f"{error}: {payload[:200]!r}", now)
            return
        record = self.record
        if piece.error is not None:
            self._error = piece.error
        if piece.has_output:
            record.piece_times.append(now)
            if self._texts is not None:
                self._texts.append(piece.text)
        self._token_ids += piece.token_ids
        if piece.finish_reason is not None:
            record.finish_reason = piece.finish_reason
        if record.request_id is None:
            record.request_id = piece.request_id
        if piece.prompt_tokens is not None:
            record.prompt_tokens = piece.prompt_tokens
        if piece.output_tokens is not None:
            record.output_tokens = piece.output_tokens
            record.tokens_known = True

    def _over(self, now: float) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._connection = None
        record = self.record
        record.end = now
        if self._texts is not None:
            record.text = "".join(self._texts)
        if not record.tokens_known:
            record.tokens_known = self._token_ids > 0
            record.output_tokens = self._token_ids or len(record.piece_times)
        self._on_over(self)


def _error_body_text(body: bytes) -> str:
    """Returns the message of an error in OpenAI's format, or the body itself if it has another format."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode("utf-8", "replace").strip()
    return error_text(content.get("error", content) if isinstance(content, dict) else content)
