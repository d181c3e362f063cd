"""Lets web pages of other origins use the server (CORS). ``serving_config.cors_origins`` lists these origins.

Before a browser sends JSON or an API key, it asks for permission with a preflight request (OPTIONS). A page may read a
response only if the response names the page's origin. The server uses no cookies, so it does not allow credentials.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import Response

from llm_serving.server.http.protocol import Header

MAX_AGE_S = 600
"""Seconds for which a browser may keep the result of a preflight request."""
_REQUESTED_METHOD, _REQUESTED_HEADERS = "access-control-request-method", "access-control-request-headers"


def cors_headers(origin: str) -> list[Header]:
    """Returns the headers that allow pages of ``origin`` to read a response in a browser."""
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", b"x-request-id, retry-after"),
        (b"vary", b"origin"),
    ]


def preflight_response(method: str, headers: Headers) -> Response | None:
    """Returns the response to a preflight request, or None for any other request."""
    if method != "OPTIONS" or _REQUESTED_METHOD not in headers:
        return None
    allowed = {"access-control-allow-methods": "GET, POST, DELETE", "access-control-max-age": str(MAX_AGE_S)}
    if _REQUESTED_HEADERS in headers:
        allowed["access-control-allow-headers"] = headers[_REQUESTED_HEADERS]
    return Response(status_code=204, headers=allowed)
