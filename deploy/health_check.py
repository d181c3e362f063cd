"""The health check of the container: asks the server for its liveness through its UNIX socket.

Exit code 0 means live.
"""

from __future__ import annotations

import http.client
import socket
import sys

SOCKET = "/run/llm-serving/server.sock"
TIMEOUT_S = 2.0


def is_live(path: str) -> bool:
    """Returns whether ``GET /health/live`` has status 200. No key is needed for this route."""
    connection = http.client.HTTPConnection("localhost", timeout=TIMEOUT_S)
    try:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(TIMEOUT_S)
        connection.sock.connect(path)
        connection.request("GET", "/health/live")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(0 if is_live(sys.argv[1] if len(sys.argv) > 1 else SOCKET) else 1)
