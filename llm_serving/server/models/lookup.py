"""Finds the model of a request, waits until the model is in memory, and keeps it there until the response was sent.

A reload replaces the version of a model. Each version has its own ``ServerState``, which is called its view. The view
has the engine, the limits and the grammars of the version. A handler gets the view of the main model. When it has read
the name of the request's model, it calls ``served``, and then uses only the returned view.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.types import Scope

from llm_serving.config.models_section import ModelsConfig
from llm_serving.constraints.compiler import GrammarCompiler
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.registry.planned_models import PlannedModels
from llm_serving.registry.registry import ModelRegistry
from llm_serving.registry.starting import VersionStarter
from llm_serving.registry.states import ModelState
from llm_serving.registry.version import Lease, RunningVersion
from llm_serving.server.fields.validation import RequestModel
from llm_serving.server.generation.scheduling import deadline_of, tenant_of, visit_of
from llm_serving.server.http.protocol import RECEIVED_AT
from llm_serving.server.state import ServerSettings, ServerState
from llm_serving.shadow.runner import ShadowRunner
from llm_serving.telemetry.log import EventLog
from llm_serving.telemetry.model_metrics import ModelCollector
from llm_serving.telemetry.shadow_metrics import ShadowCollector

LEASE = "llm_serving.lease"
"""Key of the ASGI scope whose value is the request's lease of its model."""


def open_models(
    state: ServerState, models: PlannedModels, settings: ModelsConfig, agents: ExitStack
) -> ModelRegistry[ServerState]:
    """Returns the registry of a server. ``state`` serves the main model, whose agents end when ``agents`` is closed."""
    # The first version of the main model gets a copy of ``state``. A reload changes ``state`` to the new version, while
    # requests of the first version may still run.
    view = replace(state)
    main = RunningVersion(0, state.engine, view, models.models[0].need, agents)
    make_view = partial(view_of, state)
    starter = VersionStarter(state.log, state.metrics, make_view, state.engine.observe)
    registry = ModelRegistry(
        *(models.models, main, starter, models.arbiter, state.log),
        max_wait_s=settings.max_wait_s,
        idle_unload_s=settings.idle_unload_s,
        note_main=state.follow,
    )
    state.models = view.models = registry
    state.metrics.bind(lambda: registry.main.engine.status())
    shadow = state.engine.config.shadow_config
    if shadow.model is not None:
        state.shadow = view.shadow = ShadowRunner(registry, shadow, state.log)
        state.metrics.registry.register(ShadowCollector(state.shadow.as_json))
    if registry.has_several:
        state.metrics.registry.register(ModelCollector(registry.statuses, [each.value for each in ModelState]))
    return registry


def view_of(state: ServerState, engine: AsyncEngine, log: EventLog) -> ServerState:
    """Returns the server state for requests to one version of a model. ``engine`` serves this version.

    Objects that do not depend on the model, such as the API keys, are shared with ``state``.
    """
    _ = engine.tokenizer.max_piece_chars  # a cached property: compute it before the first request
    settings = ServerSettings.from_config(engine.config)
    grammars = grammar_compiler(state, engine, settings)
    return replace(
        state, engine=engine, log=log, settings=settings, grammars=grammars, renders_inline=True, _format=None
    )


def grammar_compiler(state: ServerState, engine: AsyncEngine, settings: ServerSettings) -> GrammarCompiler | None:
    """Makes the object that compiles the grammars of a model. Returns None if structured output is turned off."""
    if not settings.structured_outputs:
        return None
    ends = sorted(engine.end_token_ids)
    return GrammarCompiler(engine.tokenizer, settings.vocab_size, ends, state.compile_queue)


async def served(
    state: ServerState, request: Request, name: str | None, fields: RequestModel | None = None
) -> ServerState:
    """Returns the view of the model ``name``. If ``name`` is None, returns the view of the main model.

    If the model is not in memory, it is started first. It stays in memory until the response has been sent. ``fields``
    is the request body, which may set a deadline for the wait. Raises ModelNotFoundError, NotPermittedError,
    QueueFullError, UnavailableError while the server stops, and ModelUnavailableError if the wait would be too long.
    """
    models, visit = state.models, visit_of(request)
    if models is None:
        state.check_model(name, visit)
        return state
    model = models.find(name)
    if visit is not None:
        visit.check_model(name or models.models[0].name)
    if model is None:
        raise state.unknown_model(name or "", visit)
    if model.version is None:
        state.check_running()
    lease: Lease[ServerState] = await models.acquire(model, _time_left(request, fields))
    release_lease(request.scope)
    request.scope[LEASE] = lease
    lease.view.engine.check_wait(_time_left(request, fields))
    if models.has_several:
        lease.view.refuse_if_full(tenant_of(request))
    return lease.view


def present(state: ServerState) -> ServerState:
    """Returns the view of the main model's present version. A reload replaces the version."""
    return state if state.models is None else state.models.main.view


def main_model(state: ServerState, request: Request) -> ServerState:
    """Returns the view of the main model's present version, which stays in memory until the response has been sent.

    Call this function after reading the body, because a reload during the reading could replace the version.
    """
    if state.models is None:
        return state
    lease = state.models.main.lease()
    release_lease(request.scope)
    request.scope[LEASE] = lease
    return lease.view


def release_lease(scope: Scope) -> None:
    """Releases the lease of a request, if the request has one."""
    lease: Lease[ServerState] | None = scope.pop(LEASE, None)
    if lease is not None:
        lease.release()


def _time_left(request: Request, fields: RequestModel | None) -> float | None:
    """Returns the seconds until the deadline of a request, or None without a deadline."""
    deadline = deadline_of(fields, request)
    received: float = request.scope[RECEIVED_AT]
    return None if deadline is None else deadline - (time.monotonic() - received)
