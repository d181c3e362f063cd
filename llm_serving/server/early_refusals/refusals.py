"""Refuses requests by their headers alone, before a task is started for them and before they are routed.

If the load is many times the capacity, most requests are refused, and the refusals share the processor with the
accepted requests. So ``EarlyRefusals`` answers a refused request as soon as its headers have arrived. It calls the same
functions as the normal path, for example for API keys, quotas, metrics and error responses. So both paths decide and
answer alike. Requests with unusual headers always take the normal path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from llm_serving.access.control import VISIT, Visit
from llm_serving.errors import RequestError
from llm_serving.server.error_replies import error_reply
from llm_serving.server.errors import ForbiddenError
from llm_serving.server.generation.scheduling import tenant_name
from llm_serving.server.http.guard import check_origin
from llm_serving.server.http.protocol import RECEIVED_AT, Header
from llm_serving.server.state import Endpoint, ServerSettings, ServerState

MAX_HOSTS = 64
"""Maximum number of accepted values of the header ``Host`` that are remembered."""


class App(Protocol):
    """The part of the application that this module uses."""

    @property
    def endpoints(self) -> Sequence[Endpoint]: ...

    @property
    def state(self) -> ServerState: ...


class EarlyRefusals:
    """Refuses requests for those endpoints of an application that check the queue first (``Endpoint.queued``)."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._paths = {each.path.encode(): each.path for each in app.endpoints if each.queued and "{" not in each.path}
        self._settings: ServerSettings | None = None
        self._hosts: set[bytes] = set()
        """Values of the header ``Host`` that ``check_origin`` has accepted with ``_settings``."""

    def response(self, url: bytes, scope: Scope) -> Response | None:
        """Returns the response to a POST that is refused, or None if the request must take the normal path.

        A request is refused here if it has no valid API key, if a quota is exceeded, or if the queue is full. ``url``
        is the URL in the request line. ``scope`` has the headers, the client and the time of arrival. If the request is
        not refused, its ``Visit`` is in ``scope``, so that the normal path does not count the request again.
        """
        path, state = self._paths.get(url), self._app.state
        if path is None or state.tracing is not None or not self._has_usual_headers(scope["headers"], state.settings):
            return None
        scope["method"], scope["path"] = "POST", path
        headers, route = Headers(raw=scope["headers"]), "unmatched"
        visit = None if state.access is None else Visit(state.access, scope, scope[RECEIVED_AT])
        try:
            if visit is not None:
                visit.enter(headers.getlist("authorization"), headers.getlist("x-api-key"))
            full = state.early_refusal(tenant_name(visit, headers), scope)
            if full is None:
                if visit is not None:
                    scope[VISIT] = visit
                return None
            route, reply = path, error_reply(full, path)
        except RequestError as error:  # the key is not valid, or a quota is exceeded
            reply = error_reply(error, path)
        state.metrics.http_response(route, reply.status)
        if visit is not None:
            visit.route, visit.status = route, reply.status
            visit.leave()
        return reply.response()

    def _has_usual_headers(self, headers: Sequence[Header], settings: ServerSettings) -> bool:
        """Returns True if the headers name this server and no web page, so that ``check_origin`` accepts them."""
        if settings is not self._settings:
            self._settings = settings
            self._hosts.clear()
        host = None
        for name, value in headers:
            if name == b"origin":
                return False
            if name == b"host" and host is None:
                host = value
        if host is None:
            return False
        if host not in self._hosts:
            try:
                check_origin(Headers(raw=list(headers)), settings)
            except ForbiddenError:
                return False
            if len(self._hosts) < MAX_HOSTS:
                self._hosts.add(host)
        return True
