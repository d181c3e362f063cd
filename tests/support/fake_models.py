"""A registry whose versions have no agents: starts take no time, or wait until a test permits them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from llm_serving.config import Config
from llm_serving.errors import AdapterError, AgentStartError, ModelUnavailableError, QueueFullError
from llm_serving.lora.registry import Adapter, AdapterRegistry
from llm_serving.registry.arbiter import Arbiter
from llm_serving.registry.planned import PlannedModel
from llm_serving.registry.registry import ModelRegistry
from llm_serving.registry.served_model import ServedModel
from llm_serving.registry.version import RunningVersion
from support.small_configs import small_config

ASLEEP_S = 20.0


class FakeEngine:
    """The part of an engine that the registry uses."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.tokenizer = object()
        self.state = "ready"
        self.ended = asyncio.Event()
        self.stop_reason = "the agents were lost too often"
        self.standby = None
        self.nodes: Any = None
        self.adapters = AdapterRegistry(2)
        self.is_stopped = False
        self.observers = [Mock(spec=["enter_service"])]

    def nodes_text(self) -> str:
        return ", ".join(node["state"] for node in self.nodes.status())

    async def stop(self) -> None:
        self.is_stopped = True
        self.ended.set()


def _check_wait(left_s: float | None) -> None:
    if left_s is not None and left_s < ASLEEP_S:
        raise ModelUnavailableError("no node has agents")


class View(str):
    """The view of a version: the name of its model and its number. It refuses the tenant ``full``.

    Its engine refuses requests whose deadline is in less than ``ASLEEP_S`` seconds.
    """

    __slots__ = ()
    engine = SimpleNamespace(check_wait=_check_wait)

    def refuse_if_full(self, tenant: str) -> None:
        if tenant == "full":
            raise QueueFullError("the queue is full")


class FakeStarter:
    """Starts versions without agents. ``view`` of a version is its config's model path and number."""

    def __init__(self) -> None:
        self.is_closing = False
        self.gate = asyncio.Event()
        self.gate.set()
        """Each start of a version waits for this event."""
        self.fails = self.is_broken = False
        self.unusable: set[str] = set()
        """Names of adapters that no version can use."""
        self.started: list[str] = []
        self.with_tokenizer: list[bool] = []
        self.now = 0.0
        self.start_s = 3.0
        """Time of a start on the clock of the registry."""

    async def start(
        self,
        config: Config,
        number: int,
        need: Any,
        *,
        tokenizer: Any = None,
        adapters: Sequence[Adapter] = (),
        **others: Any,
    ) -> RunningVersion[Any]:
        names = [adapter.name for adapter in adapters]
        self.started.append(config.model_name)
        self.with_tokenizer.append(tokenizer is not None)
        await self.gate.wait()
        self.now += self.start_s
        if self.is_broken:
            raise ValueError("a tokenizer with a hole")
        if self.fails or self.is_closing:
            raise AgentStartError("no memory left for the agent")
        started = version(config, number, need)
        for name in names:
            add_adapter(started.engine, name)
        return started

    async def check_adapters(self, adapters: Sequence[Adapter], config: Config) -> None:
        for adapter in adapters:
            if adapter.name in self.unusable:
                raise AdapterError(f"the LoRA adapter {adapter.name!r} cannot be used")

    def begin_checks(self, version: RunningVersion[Any]) -> None:
        pass


def add_adapter(engine: Any, name: str) -> None:
    engine.adapters.add(Adapter(name, f"/adapters/{name}", name.encode(), engine.adapters.take_slot()))


def version(config: Config, number: int, need: Any) -> RunningVersion[Any]:
    engine: Any = FakeEngine(config)
    return RunningVersion(number, engine, View(f"{config.model_name}.{number}"), need, ExitStack())


class FakeLog:
    """An event log that keeps the events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def error(self, message: str, *, event: str, **fields: Any) -> None:
        self.events.append((event, {"message": message, **fields}))


class Models:
    """A registry of the main model, of 4 bytes, and of further models with the given sizes. The limit is 10 bytes."""

    def __init__(self, folder: Path, sizes: dict[str, int], pinned: tuple[str, ...] = (), **settings: Any) -> None:
        config = small_config(folder)
        self.starter, self.log = FakeStarter(), FakeLog()
        self.next_size: dict[str, int] = {"main": 4, **sizes}
        """Size of a model's next version, by its name."""

        def planned(name: str, size: int) -> PlannedModel:
            named = replace(config, model_config=replace(config.model_config, model_name=name))
            return PlannedModel(named, {"host": size}, name in (*pinned, "main"), self._read_again)

        models = [planned(name, size) for name, size in self.next_size.items()]
        main = version(models[0].config, 0, models[0].need)
        starter: Any = self.starter
        log: Any = self.log
        self.registry: ModelRegistry[Any] = ModelRegistry(
            models, main, starter, Arbiter({"host": 10}), log, clock=lambda: self.starter.now, **settings
        )

    def _read_again(self, path: str | None, present: Config) -> tuple[Config, dict[str, int]]:
        model = present.model_config if path is None else replace(present.model_config, model_path=path)
        return replace(present, model_config=model), {"host": self.next_size[present.model_name]}

    def __getitem__(self, name: str) -> ServedModel[Any]:
        found = self.registry.find(name)
        assert found is not None
        return found

    def states(self) -> dict[str, str]:
        return {status.name: status.state for status in self.registry.statuses()}
