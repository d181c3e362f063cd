"""The ASGI application: it routes requests to endpoints and turns errors into responses."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from llm_serving.access.control import VISIT, AccessControl, Visit
from llm_serving.config import Config
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.server.batches.store import BatchStore
from llm_serving.server.early_refusals.expected import end_expectation
from llm_serving.server.error_replies import error_reply, note_error
from llm_serving.server.errors import ClientGoneError
from llm_serving.server.fields.validation import clip
from llm_serving.server.generation.sequences import GENERATION, Generation
from llm_serving.server.http.cors import cors_headers, preflight_response
from llm_serving.server.http.guard import check_origin
from llm_serving.server.http.protocol import RECEIVED_AT, STREAM_CHANNEL
from llm_serving.server.models.lookup import grammar_compiler, release_lease
from llm_serving.server.routes import ENDPOINTS
from llm_serving.server.state import AnyResponse, Endpoint, ServerSettings, ServerState
from llm_serving.sessions.book import SessionBook
from llm_serving.telemetry.adapter_metrics import AdapterCollector
from llm_serving.telemetry.log import EventLog
from llm_serving.telemetry.metrics import Metrics
from llm_serving.telemetry.node_metrics import NodeCollector
from llm_serving.tracing.export import Tracing
from llm_serving.tracing.trace import TRACE, HttpTrace


def create_app(
    engine: AsyncEngine,
    log: EventLog,
    metrics: Metrics,
    config: Config | ServerSettings,
    access: AccessControl | None = None,
    tracing: Tracing | None = None,
    batches: BatchStore | None = None,
) -> ServerApp:
    """Makes the ASGI application that serves ``engine``. ``metrics`` reads its gauges from the engine's status.

    Each optional part is off if it is None. Without ``access``, every client may send requests. Without ``tracing``, no
    request is traced. Without ``batches``, requests about files and batches are refused.
    """
    settings = config if isinstance(config, ServerSettings) else ServerSettings.from_config(config)
    metrics.bind(engine.status)
    _ = engine.tokenizer.max_piece_chars  # a cached property: compute it before the first request
    state = ServerState(engine, log, metrics, settings, ENDPOINTS, access, tracing=tracing, batches=batches)
    state.grammars = grammar_compiler(state, engine, settings)
    metrics.registry.register(AdapterCollector(lambda: state.engine.adapters))
    metrics.registry.register(NodeCollector(lambda: state.engine.nodes))
    if isinstance(config, Config):
        state.sessions = SessionBook(config.kv_tier_config.sessions_per_key, time.time)
    return ServerApp(state)


def split_administration(app: ServerApp) -> tuple[ServerApp, ServerApp]:
    """Splits an application for two listeners. Returns a public application and one for administration.

    The public application has all endpoints except those for administration, and the second application has only those.
    Both also serve the health endpoints and the files of the web pages.
    """
    endpoints = app.state.endpoints
    public = [one for one in endpoints if not one.admin]
    administration = [one for one in endpoints if one.admin or one.path.startswith(("/health", "/static/"))]
    return ServerApp(app.state, public), ServerApp(app.state, administration)


class ServerApp:
    """The ASGI application. It responds to every HTTP request, and raises only if a response has already begun."""

    def __init__(self, state: ServerState, endpoints: Sequence[Endpoint] | None = None) -> None:
        """``endpoints`` are the endpoints to serve. The default is all endpoints of ``state``."""
        self._state = state
        self.endpoints = state.endpoints if endpoints is None else endpoints
        routes = [Route(one.path, _Route(self, one), methods=[one.method]) for one in self.endpoints]
        self._router = Router(routes, redirect_slashes=False, default=_not_found)

    @property
    def state(self) -> ServerState:
        """The state of the main model, which changes when the model is reloaded."""
        return self._state if self._state.models is None else self._state.models.main.view

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served, not {scope['type']}")
        scope.setdefault(RECEIVED_AT, time.monotonic())
        scope["app"] = self  # so that Starlette raises a 405 as an exception, and this server formats it
        access = self.state.access
        visit: Visit | None = scope.get(VISIT)  # the request has one if ``early_refusals`` has accepted it
        try:
            headers = Headers(scope=scope)
            if self.state.tracing is not None and scope["method"] == "POST":
                traceparent = headers.get("traceparent")
                scope[TRACE] = self.state.tracing.begin(traceparent, "POST", scope["path"], scope[RECEIVED_AT])
            origin = check_origin(headers, self.state.settings)
            if origin is not None:
                scope[STREAM_CHANNEL].add_headers(cors_headers(origin))
                if (preflight := preflight_response(scope["method"], headers)) is not None:
                    self.state.metrics.http_response("preflight", preflight.status_code)
                    await preflight(scope, receive, send)
                    return
            if access is not None and visit is None:
                visit = scope[VISIT] = Visit(access, scope, scope[RECEIVED_AT])
                visit.enter(headers.getlist("authorization"), headers.getlist("x-api-key"))
            await self._router(scope, receive, send)
        except Exception as error:
            response = _error_response(self.state, scope, error)
            _note_response(self.state, scope, "unmatched", response.status_code)
            await response(scope, receive, send)
        finally:
            scope.pop(STREAM_CHANNEL, None)  # breaks a reference cycle, because the channel refers to the scope
            if visit is not None:
                visit.leave()
            trace: HttpTrace | None = scope.pop(TRACE, None)
            if trace is not None:
                trace.end(time.monotonic())


class _Route:
    """The ASGI application of one endpoint: calls its handler and turns errors into responses.

    After the response, ends the request's sequences in the engine and the request's lease of its model.
    """

    def __init__(self, app: ServerApp, endpoint: Endpoint) -> None:
        self._app = app
        self._handler = endpoint.handler
        self._is_admin = endpoint.admin
        self._name = endpoint.path.replace(":path", "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._respond(scope, receive, send)
        finally:
            generation: Generation | None = scope.pop(GENERATION, None)
            if generation is not None:
                generation.close(time.monotonic())
            release_lease(scope)
            end_expectation(scope)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: AnyResponse
        state = self._app.state
        try:
            if self._is_admin and VISIT in scope:
                scope[VISIT].check_admin()
            response = await self._handler(state, Request(scope, receive, send))
        except ClientGoneError:
            _note_response(state, scope, self._name, 499)
            return
        except Exception as error:
            response = _error_response(state, scope, error)
        await response(scope, receive, send)
        _note_response(state, scope, self._name, response.status_code)


def _note_response(state: ServerState, scope: Scope, route: str, status: int) -> None:
    """Counts a response in the metrics and records it for the audit log.

    ``route`` is the path of the endpoint, or ``unmatched`` if the URL has no endpoint.
    """
    state.metrics.http_response(route, status)
    visit: Visit | None = scope.get(VISIT)
    if visit is not None:
        visit.route, visit.status = route, status
    trace: HttpTrace | None = scope.get(TRACE)
    if trace is not None:
        trace.route, trace.status = route, status


def _error_response(state: ServerState, scope: Scope, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        error.detail = f"{clip(scope['path'])} does not take {scope['method']}; use {allowed}."
    reply = error_reply(error, scope["path"])
    generation: Generation | None = scope.get(GENERATION)
    request_id, is_logged = (None, False) if generation is None else (generation.request_id, generation.is_refused)
    note_error(state.log, error, reply, scope["path"], request_id, is_logged=is_logged)
    return reply.response(request_id)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404, f"Unknown URL: {scope['method']} {clip(scope['path'])}")
