"""Keeps web pages of other origins away from a server that anybody on this machine may use.

A browser lets any page send requests to ``http://127.0.0.1``. Such a request carries the page's ``Origin``; and a
page that points its own host name at 127.0.0.1 (DNS rebinding) carries that name in ``Host``. Both are refused.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from llm_serving.server.errors import ForbiddenError
from llm_serving.server.state import ServerSettings
from llm_serving.server.validation import clip

__all__ = ["check_origin"]


def check_origin(headers: Headers, settings: ServerSettings) -> None:
    """Raises ForbiddenError (403) for a request that a foreign web page makes a browser send."""
    host = headers.get("host", "")
    if settings.loopback and not _is_local(_host_name(host), settings):
        raise ForbiddenError(
            f"The host {clip(host)!r} is not this server's: it listens on this machine only, as localhost or by its "
            "address."
        )
    origin = headers.get("origin")
    if origin is not None and _authority(origin) != host.lower():
        raise ForbiddenError(f"Requests from web pages of another origin ({clip(origin)!r}) are not taken.")


def _is_local(name: str, settings: ServerSettings) -> bool:
    if name in ("", "localhost") or name.endswith(".localhost") or name in settings.hosts:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _host_name(host: str) -> str:
    """``host`` without its port, in lower case."""
    name, _, port = host.rpartition(":")
    return (name if port.isdecimal() and name else host).lower()


def _authority(origin: str) -> str | None:
    """Host and port of an origin; None for ``null`` and the like."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None
