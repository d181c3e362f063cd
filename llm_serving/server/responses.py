"""JSON responses."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

__all__ = ["json_response"]


def json_response(content: Any, request_id: str | None = None, status: int = 200) -> Response:
    """``content`` as JSON."""
    headers = {} if request_id is None else {"X-Request-Id": request_id}
    return Response(orjson.dumps(content), status, headers, "application/json")
