"""Exports and imports session files over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from support.server_process import ServerProcess
from support.time_limits import time_limit


def call(server: ServerProcess, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Sends a request with a file as its body. Returns the status and the body of the response."""
    headers = {} if body is None else {"content-type": "application/octet-stream"}
    request = urllib.request.Request(server.url + path, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=time_limit(30)) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def put(server: ServerProcess, file: bytes, session_id: str = "trip") -> dict[str, Any]:
    """Imports a session file. Returns the JSON of the response."""
    answer: dict[str, Any] = json.loads(call(server, "PUT", f"/v1/sessions/{session_id}", file)[1])
    return answer
