"""Turns exceptions into HTTP responses with OpenAI's JSON form of errors, and logs unexpected exceptions."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from llm_serving.errors import (
    AgentError,
    AgentLostTwiceError,
    EngineFailedError,
    NotFiniteError,
    QuotaExceededError,
    RequestError,
    TryLaterError,
)
from llm_serving.server.errors import UnavailableError
from llm_serving.server.fields.validation import clip
from llm_serving.telemetry.log import EventLog

RETRY_AFTER_S = 1
"""Seconds in ``Retry-After`` of a refused request, if no better estimate is known."""
_NO_RETRY = {"X-Should-Retry": "false"}
"""A header that stops OpenAI's clients from sending the same request again."""
MAX_RETRY_AFTER_S = 30
"""Maximum seconds in ``Retry-After`` of a refused request."""
MAX_QUOTA_RETRY_AFTER_S = 60
"""Maximum seconds in ``Retry-After`` if a key has used its requests or tokens per minute. These quotas refill within a
minute, so the time is exact and no estimate.
"""
INTERNAL_ERROR = "internal_error"
_WRONG_REQUEST = frozenset({400, 404, 408, 413, 415})
"""Statuses of errors that the client must correct. The log has an event for them. It has others for refused keys (401,
403), and for a full queue (429).
"""

FAILURE_TEXTS = {
    "agent_lost": "An agent failed, so the server could not complete the request. Send the request again.",
    "logits_not_finite": "The model computed no valid scores (NaN or infinity) for this request, so it was ended.",
    "agent_lost_twice": "An agent failed twice while it computed this request. Do not send the request again.",
    "engine_error": "The engine could not complete the request. The server's log has the reason.",
    INTERNAL_ERROR: "The server had an internal error; see its log.",
}
"""The error messages that clients get for failures, by error code. The exception's text may name processes, addresses
and files, so only the log has it."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The HTTP response to an error: status, JSON members and headers."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_anthropic: bool = False
    """Whether the body has the form of Anthropic's API, and not of OpenAI's."""
    is_kserve: bool = False
    """Whether the body has the form of KServe's protocol, a flat object: ``{"error": MESSAGE, "type": ...}``."""

    def body(self) -> bytes:
        """Returns the JSON body, in the form of the API that the client uses.

        OpenAI's form is ``{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}``. In Anthropic's form,
        ``type`` has other values, and the outer object also has ``"type": "error"``. KServe's form is a flat object, in
        which ``error`` is the message.
        """
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        if self.is_kserve:
            error["error"] = error.pop("message")
            return orjson.dumps(error)
        if not self.is_anthropic:
            return orjson.dumps({"error": error})
        error["type"] = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else error["type"])
        return orjson.dumps({"type": "error", "error": error})

    def response(self, request_id: str | None = None) -> Response:
        """Returns the response. ``request_id`` becomes the header ``X-Request-Id``.

        The log has the same id, so that the operator finds the details of the client's error.
        """
        named = {} if request_id is None else {"X-Request-Id": request_id}
        return Response(self.body(), self.status, {**self.headers, **named}, "application/json")


ANTHROPIC_PATH = "/v1/messages"
"""Errors of this path, and of all paths below it, have the form of Anthropic's API."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def has_anthropic_errors(path: str) -> bool:
    """Returns whether the errors of a URL's path have the form of Anthropic's API."""
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


KSERVE_PATHS = ("/v2", "/v2/health/live", "/v2/health/ready")
KSERVE_MODELS = "/v2/models/"


def has_kserve_errors(path: str) -> bool:
    """Returns whether the errors of a URL's path have the form of KServe's protocol."""
    return path in KSERVE_PATHS or path.startswith(KSERVE_MODELS)


def error_reply(error: Exception, path: str = "") -> ErrorReply:
    """Returns the HTTP response for an exception.

    If the server itself failed, the message is a general one from ``FAILURE_TEXTS``. ``path`` is the path of the URL.
    It determines the form of the body: OpenAI's, Anthropic's or KServe's.
    """
    reply = _reply(error)
    if has_kserve_errors(path):
        return replace(reply, is_kserve=True)
    return replace(reply, is_anthropic=True) if has_anthropic_errors(path) else reply


def _reply(error: Exception) -> ErrorReply:
    if isinstance(error, RequestError):
        return _request_error(error)
    if isinstance(error, UnavailableError):
        return ErrorReply(503, str(error), "server_error", code=error.code, headers=_retry_after())
    if isinstance(error, AgentError):
        return _failure(503, "agent_lost", _retry_after())
    if isinstance(error, NotFiniteError):
        return _failure(500, "logits_not_finite")
    if isinstance(error, AgentLostTwiceError):
        return _failure(500, "agent_lost_twice", _NO_RETRY)
    if isinstance(error, EngineFailedError):
        return _failure(500, "engine_error")
    if isinstance(error, HTTPException):
        return ErrorReply(
            error.status_code, error.detail, _type_of(error.status_code), headers=dict(error.headers or {})
        )
    return _failure(500, INTERNAL_ERROR)


def note_error(
    log: EventLog, error: Exception, reply: ErrorReply, where: str, request_id: str | None, *, is_logged: bool = False
) -> None:
    """Logs the details of a failure, because the client gets only a general message. ``where`` is the URL's path.

    ``request_id`` is the id in the response, or None if the body was not read. An unexpected exception is logged with
    its traceback. A wrong request is logged without its message, which may quote the prompt, and not at all if
    ``is_logged`` says that the log already has its refusal.
    """
    if isinstance(error, AgentError | EngineFailedError):
        log.error(str(error), event="request_failed", request_id=request_id, where=where, code=reply.code)
    elif reply.code == INTERNAL_ERROR:
        trace = "".join(traceback.format_exception(error))
        log.error(
            f"{type(error).__name__}: {error}",
            event="internal_error",
            request_id=request_id,
            where=where,
            traceback=trace,
        )
    elif isinstance(error, RequestError) and reply.status in _WRONG_REQUEST and not is_logged:
        named = {} if request_id is None else {"request_id": request_id}
        log.event(
            "request_invalid", **named, where=clip(where), status=reply.status, code=reply.code, param=reply.param
        )


def _failure(status: int, code: str, headers: Mapping[str, str] | None = None) -> ErrorReply:
    return ErrorReply(status, FAILURE_TEXTS[code], "server_error", code=code, headers=headers or {})


def _request_error(error: RequestError) -> ErrorReply:
    headers: dict[str, str] = {}
    if isinstance(error, TryLaterError):
        is_per_minute = isinstance(error, QuotaExceededError) and error.is_per_minute
        limit = MAX_QUOTA_RETRY_AFTER_S if is_per_minute else MAX_RETRY_AFTER_S
        headers = _retry_after(error.retry_after_s, limit)
    elif error.status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    elif error.status == 504:
        headers = _NO_RETRY
    elif error.status in (408, 413):
        headers = {"Connection": "close"}
    return ErrorReply(error.status, str(error), _type_of(error.status), error.param, error.code, headers)


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _retry_after(seconds: float = RETRY_AFTER_S, limit: int = MAX_RETRY_AFTER_S) -> dict[str, str]:
    return {"Retry-After": str(min(max(RETRY_AFTER_S, math.ceil(seconds)), limit))}
