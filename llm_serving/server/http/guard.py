"""Protects the server from foreign web pages in a browser on this machine.

A browser lets any page send requests to ``http://127.0.0.1``. The header ``Origin`` of the request then names the
page's server. A page may also point its own host name at 127.0.0.1 (DNS rebinding). The header ``Host`` then has that
name. So the server checks both headers, and refuses names that it does not know.

To add another check of this kind, change ``check_origin``. ``ServerApp`` calls it for every request.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request

from llm_serving.server.errors import ForbiddenError
from llm_serving.server.fields.validation import clip
from llm_serving.server.state import ServerSettings

_PROXY_HEADERS = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "x-request-start")
"""Headers that reverse proxies add. A browser or a client library does not send them."""


def check_origin(headers: Headers, settings: ServerSettings) -> str | None:
    """Checks the headers ``Host`` and ``Origin``. Raises ForbiddenError (403) if a foreign web page made the request.

    Returns the ``Origin`` if ``serving_config.cors_origins`` allows it. Returns None for programs and for the server's
    own pages.
    """
    host = headers.get("host", "")
    if not _is_own_name(_host_name(host), settings):
        raise ForbiddenError(
            f"The host {clip(host)!r} is not a name of this server. Use localhost or the server's address, or let the "
            "operator add the name to serving_config.allowed_hosts."
        )
    origin = headers.get("origin")
    if origin is None or _authority(origin) == host.lower():
        return None
    if origin.lower() not in settings.cors_origins and "*" not in settings.cors_origins:
        raise ForbiddenError(
            f"Requests from web pages of another origin ({clip(origin)!r}) are refused. The operator can add the "
            "origin to serving_config.cors_origins."
        )
    return origin


def is_on_this_machine(request: Request) -> bool:
    """Returns whether a request comes from a program on this machine, and not through a reverse proxy."""
    if request.client is None or any(name in request.headers for name in _PROXY_HEADERS):
        return False
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False


def _is_own_name(name: str, settings: ServerSettings) -> bool:
    if name in ("", "localhost") or name.endswith(".localhost") or name in settings.hosts or "*" in settings.hosts:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _host_name(host: str) -> str:
    """Returns ``host`` without its port, in lower case."""
    name, _, port = host.rpartition(":")
    return (name if port.isdecimal() and name else host).lower()


def _authority(origin: str) -> str | None:
    """Returns host and port of an ``Origin`` header. None if the header names no host, for example if it is ``null``.
    """
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None
