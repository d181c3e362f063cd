"""The health check of the container: ``health_check.py [SOCKET [KEY_FILE]]``.

It asks the server through its UNIX socket. Without a key, it asks whether the server is live, because this route needs
no key. With the API key of KEY_FILE, it asks whether the server is ready. Exit code 0 means yes.
"""

from __future__ import annotations

import http.client
import socket
import sys
from pathlib import Path

SOCKET = "/run/llm-serving/server.sock"
LIVE_TIMEOUT_S = 2.0
READY_TIMEOUT_S = 35.0
"""Maximum seconds for the answer whether the server is ready. The server waits up to 31 s for slow agents."""


def is_ok(path: str, route: str, headers: dict[str, str], timeout_s: float) -> bool:
    """Returns whether a GET of ``route`` through the UNIX socket ``path`` has status 200 within ``timeout_s``."""
    connection = http.client.HTTPConnection("localhost", timeout=timeout_s)
    try:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(timeout_s)
        connection.sock.connect(path)
        connection.request("GET", route, headers=headers)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def main(path: str = SOCKET, key_file: str | None = None) -> int:
    """Returns the exit code."""
    if key_file is None:
        return 0 if is_ok(path, "/health/live", {}, LIVE_TIMEOUT_S) else 1
    key = Path(key_file).read_text().strip()
    return 0 if is_ok(path, "/health/ready", {"Authorization": f"Bearer {key}"}, READY_TIMEOUT_S) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
