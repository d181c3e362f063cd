"""Parses the address of a server and sends simple requests to it."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

from performance.program import LoadTestError, UsageError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Host and port of a server. ``prefix`` is put before every URL path."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"

    def get(self, path: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> tuple[int, str, bytes]:
        """Sends a GET request. Returns status, content type and body. Raises OSError or http.client.HTTPException."""
        return self._send("GET", path, timeout_s, headers or {})

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> bytes:
        """Sends a POST request with a JSON body. Returns the body of the response.

        Raises LoadTestError if the status is not 200. Raises OSError or http.client.HTTPException without a response.
        """
        content, headers = orjson.dumps(body), {"Content-Type": "application/json"}
        status, _, text = self._send("POST", path, timeout_s, headers, content)
        if status != 200:
            raise LoadTestError(f"{path} returned {status}: {text.decode(errors='replace')}")
        return text

    def _send(
        self, method: str, path: str, timeout_s: float, headers: Mapping[str, str], content: bytes | None = None
    ) -> tuple[int, str, bytes]:
        kind = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=timeout_s)
        try:
            connection.request(method, f"{self.prefix}{path}", content, dict(headers))
            response = connection.getresponse()
            return response.status, response.getheader("Content-Type", ""), response.read()
        finally:
            connection.close()


def parse_endpoint(url: str) -> Endpoint:
    """Parses ``http://host:port/prefix``. Drops ``/v1`` at the end, because the paths of the APIs begin with it."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise UsageError(f"--base-url {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--base-url {url!r}: expected http://HOST:PORT or https://HOST:PORT")
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Endpoint(parts.hostname, port or (443 if tls else 80), tls, prefix)
