"""Starts a version of a model: its agents, its engine, and the view through which the HTTP edge uses the version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

from llm_serving.config import Config
from llm_serving.engine.assembly import make_engine, make_executors, wait_ready
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.schedulers import ObserveCache
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.engine.tokenizer_backends import load_tokenizer
from llm_serving.errors import AdapterError, AgentStartError
from llm_serving.lora.loading import configured_names, read_into_memory
from llm_serving.lora.registry import Adapter
from llm_serving.model.source_files import files_fingerprint
from llm_serving.registry.arbiter import Need
from llm_serving.registry.model_log import ModelLog
from llm_serving.registry.planned import with_log_folder
from llm_serving.registry.version import RunningVersion
from llm_serving.self_checks.canary import Canary
from llm_serving.telemetry.log import EventLog
from llm_serving.telemetry.metrics import Metrics

V = TypeVar("V")

MakeView = Callable[[AsyncEngine, EventLog], V]
"""Creates the view of a version, through which the HTTP edge uses it. This may take long, so another thread than the
event loop's calls the function.
"""


class VersionStarter(Generic[V]):
    """Starts versions of models. All versions share the event log and the metrics of the server."""

    def __init__(
        self, log: EventLog, metrics: Metrics, make_view: MakeView[V], observe: ObserveCache | None = None
    ) -> None:
        """``observe`` creates the observer of a replica's prefix cache. Only the main model has these observers."""
        self._observe = observe
        self._log = log
        self._metrics = metrics
        self._make_view = make_view
        self.is_closing = False
        """True if the server stops. Starts that are in progress then raise AgentStartError."""

    async def start(
        self,
        config: Config,
        number: int,
        need: Need,
        *,
        tokenizer: Tokenizer | None = None,
        adapters: Sequence[Adapter] = (),
        is_main: bool = False,
    ) -> RunningVersion[V]:
        """Starts version ``number`` of a model, and returns the version when its agents are ready.

        ``tokenizer``: the model's tokenizer, if it is in memory. ``adapters``: the LoRA adapters of the old version,
        which the new version must also have. Raises LLMServingError or OSError if the version does not start. All its
        processes have then ended.
        """
        log = self._log if is_main else ModelLog(self._log, config.model_name)
        owned, engine, is_started = ExitStack(), None, False
        try:
            observe, config = self._observe if is_main else None, with_log_folder(config, number)
            engine = await asyncio.to_thread(self._make_engine, config, tokenizer, log, owned, observe)
            await asyncio.to_thread(_copy_adapters, adapters, engine)
            view = await asyncio.to_thread(self._make_view, engine, log)
            engine.start()
            is_started = True
            if not await wait_ready(engine, lambda: self.is_closing):
                raise AgentStartError("the server is stopping")
        except BaseException:
            if engine is not None:
                if not is_started:
                    engine.start()  # only a running engine can free the shared memory of its adapters
                await engine.stop()
            await asyncio.to_thread(owned.close)
            raise
        version = RunningVersion(number, engine, view, need, owned)
        self.begin_checks(version)
        return version

    async def check_adapters(self, adapters: Sequence[Adapter], config: Config) -> None:
        """Reads adapters and checks whether a version with ``config`` can use them. Raises AdapterError if not."""
        await asyncio.to_thread(_check_adapters, adapters, config)

    def begin_checks(self, version: RunningVersion[V]) -> None:
        """Starts the canary (regular test requests) of a version if its config has an interval for it."""
        config = version.engine.config
        if config.serving_config.canary_interval_s and config.pooling is None:
            canary = Canary(version.engine, self._log, self._metrics, config.serving_config.canary_interval_s)
            version.checks = asyncio.get_running_loop().create_task(canary.run())

    def _make_engine(
        self,
        config: Config,
        tokenizer: Tokenizer | None,
        log: EventLog,
        owned: ExitStack,
        observe: ObserveCache | None,
    ) -> AsyncEngine:
        config = with_fingerprint(config)
        executors = make_executors(config, lambda rank, stage, done, total: None, owned)
        for executor in executors:
            executor.start()
        tokenizer = tokenizer or load_tokenizer(config)
        return make_engine(config, tokenizer, executors, log, self._metrics, observe=observe)


def with_fingerprint(config: Config) -> Config:
    """Returns a copy of ``config`` with the fingerprint of the model's present files. Raises AgentStartError if they
    cannot be read.
    """
    path = config.model_config.model_path
    is_dummy = config.model_config.load_format == "dummy"
    try:
        fingerprint = files_fingerprint(None if is_dummy or path is None else Path(path))
    except OSError as error:
        raise AgentStartError(f"the files of the model cannot be read: {error}") from error
    return replace(config, files_fingerprint=fingerprint)


def _check_adapters(adapters: Sequence[Adapter], config: Config) -> None:
    for adapter in _kept(adapters, config):
        try:
            _, memory = read_into_memory(Path(adapter.path), config)
        except AdapterError as error:
            raise AdapterError(f"the LoRA adapter {adapter.name!r} ({adapter.path}) cannot be used: {error}") from None
        memory.close()


def _copy_adapters(adapters: Sequence[Adapter], engine: AsyncEngine) -> None:
    """Loads into ``engine`` those of ``adapters`` that its config does not name. Raises AdapterError."""
    for adapter in _kept(adapters, engine.config):
        digest, memory = read_into_memory(Path(adapter.path), engine.config)
        engine.adapters.keep(adapter.name, adapter.path, digest, memory)


def _kept(adapters: Sequence[Adapter], config: Config) -> list[Adapter]:
    """Returns the ``adapters`` that an engine with ``config`` does not have from its config.

    Raises AdapterError if the slots do not suffice for these adapters and those of the config. Without this check, an
    adapter would replace another one.
    """
    own, slots = configured_names(config), config.lora_config.max_adapters
    kept = [adapter for adapter in adapters if adapter.name not in own]
    if len(own) + len(kept) > slots:
        raise AdapterError(
            f"the {len(kept)} loaded LoRA adapters and the {len(own)} of lora_config.adapters are more than "
            f"lora_config.max_adapters = {slots}. Unload adapters, or raise lora_config.max_adapters."
        )
    return kept
