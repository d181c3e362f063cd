"""Tests how a request gets the view of its model, with a registry whose models have no agents."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from starlette.requests import Request

from llm_serving.access.control import VISIT
from llm_serving.config import load_config
from llm_serving.config.models_section import ModelsConfig
from llm_serving.constraints import compile_queue
from llm_serving.constraints.grammar import choice_grammar
from llm_serving.engine.tokenizer_backends import load_tokenizer
from llm_serving.errors import ModelNotFoundError, ModelUnavailableError, NotPermittedError, QueueFullError
from llm_serving.registry.arbiter import Arbiter
from llm_serving.registry.planned import PlannedModel
from llm_serving.registry.planned_models import PlannedModels
from llm_serving.registry.version import RunningVersion
from llm_serving.server.app import ServerApp
from llm_serving.server.errors import UnavailableError
from llm_serving.server.http.protocol import RECEIVED_AT
from llm_serving.server.models.lookup import (
    grammar_compiler,
    main_model,
    open_models,
    present,
    release_lease,
    served,
    view_of,
)
from llm_serving.server.operations.admin import is_ready
from llm_serving.server.state import ServerSettings, ServerState
from support.fake_models import FakeEngine, FakeLog, Models
from support.model_scripts import play
from support.small_configs import small_config


class Visit:
    """A visit of a key that may use only the main model."""

    def __init__(self, name: str) -> None:
        self.name = name

    def check_model(self, model: str) -> None:
        if model != "main":
            raise NotPermittedError(f"may not use {model}")


def request(visit: Visit | None = None, **headers: str) -> Request:
    named = [(name.lower().replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    more = {} if visit is None else {VISIT: visit}
    return Request({"type": "http", "headers": named, RECEIVED_AT: time.monotonic(), **more})


def state_of(models: Models, *, is_stopping: bool = False) -> Any:
    def check_running() -> None:
        if is_stopping:
            raise UnavailableError("stopping", "stopping")

    def unknown_model(name: str, visit: Visit | None) -> ModelNotFoundError:
        return ModelNotFoundError(f"unknown {name}")

    return SimpleNamespace(models=models.registry, check_running=check_running, unknown_model=unknown_model)


def test_a_request_holds_its_model_until_the_response(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        one = request()
        assert await served(state_of(models), one, "a") == "a.0"
        assert models["a"].status().requests == 1
        assert await served(state_of(models), request(), None) == "main.0"
        release_lease(one.scope)
        release_lease(one.scope)
        assert models["a"].status().requests == 0

    play(script, tmp_path, {"a": 3})


def test_a_request_that_cannot_wait_for_a_node_is_refused(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        assert await served(state_of(models), request(X_Deadline_Ms="60000"), "a") == "a.0"
        with pytest.raises(ModelUnavailableError, match="no node has agents"):
            await served(state_of(models), request(X_Deadline_Ms="10000"), "a")

    play(script, tmp_path, {"a": 3})


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        with pytest.raises(ModelNotFoundError, match="unknown b"):
            await served(state_of(models), request(), "b")

    play(script, tmp_path, {"a": 3})


def test_a_key_without_the_right_does_not_start_the_model(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        with pytest.raises(NotPermittedError, match="may not use a"):
            await served(state_of(models), request(Visit("key")), "a")
        assert await served(state_of(models), request(Visit("key")), None) == "main.0"
        assert models.starter.started == []

    play(script, tmp_path, {"a": 3})


def test_a_stopping_server_starts_no_model(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        with pytest.raises(UnavailableError):
            await served(state_of(models, is_stopping=True), request(), "a")
        assert models.starter.started == []

    play(script, tmp_path, {"a": 3})


def test_the_deadline_of_a_request_limits_its_wait(tmp_path: Path) -> None:
    async def script(models: Models) -> None:
        models.starter.gate.clear()
        with pytest.raises(ModelUnavailableError, match="not ready within"):
            await served(state_of(models), request(x_deadline_ms="20"), "a")
        models.starter.gate.set()

    play(script, tmp_path, {"a": 3})


def test_a_command_to_the_main_model_holds_its_present_version(tmp_path: Path) -> None:
    """The command holds the present version, so a reload does not end the agents that start a profile."""

    async def script(models: Models) -> None:
        one = request()
        assert main_model(state_of(models), one) == "main.0"  # type: ignore[comparison-overlap]
        assert models["main"].status().requests == 1
        release_lease(one.scope)
        assert models["main"].status().requests == 0
        models["main"].version.view = "main.1"
        assert main_model(state_of(models), request()) == "main.1"  # type: ignore[comparison-overlap]

    play(script, tmp_path, {})


def test_a_probe_of_a_replaced_version_asks_the_new_version(tmp_path: Path) -> None:
    """A reload ends the old engine while its agents are probed. The probe must then ask the new version, which is
    ready.
    """

    def view(*, is_replaced: bool) -> Any:
        async def probe(timeout_s: float) -> bool:
            if is_replaced:
                models.registry.main.view = new
            return not is_replaced

        status = SimpleNamespace(state="ready", last_step_age_s=None)
        engine = SimpleNamespace(status=lambda: status, probe=probe)
        return SimpleNamespace(engine=engine, models=models.registry, active=SimpleNamespace(stopping=False))

    async def script(found: Models) -> None:
        nonlocal models, new
        models, new = found, None
        new, old = view(is_replaced=False), view(is_replaced=True)
        models.registry.main.view = old
        assert await is_ready(lambda: present(old)) == (True, "ready")

    models: Any = None
    new: Any = None
    play(script, tmp_path, {})


def test_a_server_has_ended_only_if_its_main_model_has(tmp_path: Path) -> None:
    """A reload with draining ends the old engine before the new one starts. Health checks and batches must not treat
    this as the server's end.
    """

    async def script(models: Models) -> None:
        engine: Any = SimpleNamespace(state="stopped")
        log: Any = models.log
        metrics: Any = None
        settings: Any = None
        state = ServerState(engine, log, metrics, settings, ())
        assert state.has_ended
        state.models = models.registry
        assert not state.has_ended
        models.registry.ended.set()
        assert state.has_ended

    play(script, tmp_path, {})


def test_the_queue_of_the_requested_model_counts(tmp_path: Path) -> None:
    """The queue of the requested model is full, so the request is refused. The response ends the request's lease on the
    model.
    """

    async def script(models: Models) -> None:
        one = request(Visit("full"))
        with pytest.raises(QueueFullError):
            await served(state_of(models), one, "main")
        release_lease(one.scope)
        assert models["main"].status().requests == 0

    play(script, tmp_path, {"a": 3})


def test_the_server_keeps_no_version_that_a_reload_has_replaced(tmp_path: Path) -> None:
    async def script() -> None:
        config, log = small_config(tmp_path), FakeLog()
        first: Any = FakeEngine(config)
        first.observe = None
        need = {"host": 1}
        state = ServerState(first, log, Mock(), ServerSettings.from_config(config), ())  # type: ignore[arg-type]
        app = ServerApp(state)
        models = PlannedModels((PlannedModel(config, need, True, Mock()),), Arbiter({"host": 10}))
        registry = open_models(state, models, ModelsConfig(), ExitStack())
        old = registry.main
        assert app.state is old.view
        assert app.state.engine is first
        second: Any = FakeEngine(config)
        version = RunningVersion(1, second, replace(state, engine=second), need, ExitStack())
        registry._transitions.put(registry.models[0], version)
        assert app.state.engine is state.engine is second
        assert old.view.engine is first, "requests that began before the reload use the old version"
        await old.stop()
        await asyncio.sleep(0)
        freed = weakref.ref(first)
        del first, old
        gc.collect()
        assert freed() is None
        await registry.close()

    asyncio.run(script())


def test_the_grammars_of_all_models_wait_in_one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar of the main model waits. So another model and a reloaded version have no place for a second one."""
    monkeypatch.setattr(compile_queue, "MAX_COMPILING", 0)
    monkeypatch.setattr(compile_queue, "MAX_WAITING_OF_TENANT", 1)
    config, need = load_config("llama_tiny_cpu.yaml"), {"host": 1}
    tokenizer = load_tokenizer(config)

    def engine() -> Any:
        made: Any = FakeEngine(config)
        made.tokenizer, made.observe, made.end_token_ids = tokenizer, None, frozenset(tokenizer.eos_token_ids)
        return made

    def compiled(view: ServerState, text: str) -> asyncio.Task[Any]:
        assert view.grammars is not None
        return asyncio.create_task(view.grammars.compile(choice_grammar([text]), "field", "key"))

    async def script() -> None:
        log: Any = FakeLog()
        state = ServerState(engine(), log, Mock(), ServerSettings.from_config(config), ())
        state.grammars = grammar_compiler(state, state.engine, state.settings)
        models = PlannedModels((PlannedModel(config, need, True, Mock()),), Arbiter({"host": 10}))
        registry = open_models(state, models, ModelsConfig(), ExitStack())
        first, old = compiled(registry.main.view, "a"), registry.main
        await asyncio.sleep(0)
        reloaded = engine()
        version = RunningVersion(1, reloaded, view_of(state, reloaded, log), need, ExitStack())
        registry._transitions.put(registry.models[0], version)
        assert state.grammars is registry.main.view.grammars is not old.view.grammars
        # The last view belongs to a model that starts after the reload.
        for view in (registry.main.view, view_of(state, engine(), log)):
            second = compiled(view, "b")
            for _ in range(10):
                await asyncio.sleep(0)
            assert second.done(), "the grammar waits in another queue"
            with pytest.raises(QueueFullError, match="1 grammars of this client wait"):
                await second
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await old.stop()
        await registry.close()

    asyncio.run(script())
