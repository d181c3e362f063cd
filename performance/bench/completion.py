"""Sends a completion to a server and waits for it, for benchmarks that time whole requests."""

from __future__ import annotations

import http.client
from typing import Any

import orjson

from performance.load.endpoint import Endpoint
from performance.program import LoadTestError

REQUEST_TIMEOUT_S = 600.0
"""Maximum seconds of a request."""


class CompletionError(LoadTestError):
    """Raised if the server does not respond, or refuses the request."""


def complete(server: Endpoint, body: dict[str, Any]) -> Any:
    """Sends ``body`` to ``/v1/completions``. Returns ``choices[0]`` of the response."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=REQUEST_TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", orjson.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = orjson.loads(response.read())
    except (OSError, http.client.HTTPException) as error:
        raise CompletionError(f"the server did not respond: {error}") from error
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise CompletionError(f"the server refused a request: {content}")
    return content["choices"][0]
