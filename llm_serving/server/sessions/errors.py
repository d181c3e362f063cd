"""The errors of the endpoints for sessions."""

from __future__ import annotations

from llm_serving.errors import RequestError


class UnknownSessionError(RequestError):
    """The session does not exist, or it belongs to another tenant."""

    status = 404
    code = "session_not_found"


class SessionsOffError(RequestError):
    """The model has no KV tiers. Sessions need them to read blocks for a file, and to store blocks of a file."""

    code = "sessions_off"
