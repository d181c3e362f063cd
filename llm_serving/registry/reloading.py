"""Replaces the version of a model by a new version. No request fails because of the replacement."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from llm_serving.config import Config
from llm_serving.errors import (
    AdapterError,
    CheckpointError,
    ConfigError,
    LLMServingError,
    MemoryPlanError,
    ModelMemoryError,
    ModelStateError,
)
from llm_serving.lora.registry import Adapter
from llm_serving.registry.arbiter import Need
from llm_serving.registry.freeing import return_free_memory
from llm_serving.registry.served_model import ServedModel
from llm_serving.registry.states import ModelState
from llm_serving.registry.transitions import Transitions
from llm_serving.registry.version import RunningVersion

V = TypeVar("V")


def num_free_together(nodes: Sequence[Mapping[str, object]], prompt_pools: Sequence[str]) -> int:
    """Returns the largest number of free nodes that one replica may use.

    ``prompt_pools`` are the model's pools by prompt length. A replica uses the nodes that name its pool. If there are
    none, or the model has no pools, the replica uses the nodes that name no pool.
    """
    named = {node.get("pool") for node in nodes}
    free = Counter(node.get("pool") for node in nodes if node["state"] == "free")
    return max(free[pool if pool in named else None] for pool in prompt_pools or (None,))


class NoFreeNodeError(LLMServingError):
    """Too few nodes are free for a second version of a model."""


@dataclass(frozen=True, slots=True)
class _Next:
    """The config of the next version, and the memory that it needs."""

    config: Config
    need: Need


async def reload(
    transitions: Transitions[V], model: ServedModel[V], path: str | None, *, drain_first: bool
) -> None:
    """Replaces the version of a model. Running requests complete with the old version.

    ``path`` is another model folder. None: the same folder, whose files may have changed. The new version normally
    starts while the old version serves. If the memory is too small for both, and ``drain_first`` is True, the old
    version first completes its requests and ends, while new requests wait. If the model is not in memory, only its
    config changes, for the next start.

    The new version gets the LoRA adapters of the old version. Raises ModelStateError if the memory is too small, if the
    new version does not start, or if a LoRA adapter is being loaded. The old version then continues to serve, unless it
    had to end first.
    """
    _check(model)
    model.is_reloading = True
    try:
        following = await asyncio.to_thread(_read_again, model, path)
        old = model.version
        if model.state is not ModelState.READY or old is None:
            model.config, model.need, model.tokenizer = following.config, following.need, None
            return
        work = _Reload(transitions, model, old, following)
        del old  # the traceback of an error refers to this frame, and must not keep an ended version in memory
        adapters = work.freeze_adapters()
        try:
            if drain_first:
                await work.check_adapters(adapters)
            victims = work.victims(drain_first=drain_first)
            if victims is None:
                await work.exchange(adapters)
            else:
                await work.switch(victims, adapters)
        finally:
            work.thaw_adapters()
    finally:
        model.is_reloading = False
        transitions.room.set()


def _check(model: ServedModel[V]) -> None:
    if model.planned.load is None:
        raise ModelStateError(f"The config of the model {model.name!r} cannot be read again.")
    is_starting = model.version is not None and model.version.engine.state == "starting"
    if model.is_reloading or model.retired or model.change is not None or is_starting:
        raise ModelStateError(
            f"The model {model.name!r} starts, ends or still completes requests of its old version; send the command "
            "again later."
        )


def _read_again(model: ServedModel[V], path: str | None) -> _Next:
    """Reads the config of a model again. Raises ModelStateError if the config is wrong."""
    assert model.planned.load is not None
    try:
        return _Next(*model.planned.load(path, model.config))
    except (ConfigError, CheckpointError, MemoryPlanError) as error:
        raise ModelStateError(f"The model is not reloaded: {error}", code="model_invalid") from None


class _Reload(Generic[V]):
    """One reload of a model that serves."""

    def __init__(
        self, transitions: Transitions[V], model: ServedModel[V], old: RunningVersion[V], following: _Next
    ) -> None:
        self._transitions = transitions
        self._model = model
        self._old = old
        self._next = following
        self._began = transitions.clock()
        self._has_ended = False
        """True if the old version has ended. Then ``_old`` no longer exists."""

    def freeze_adapters(self) -> list[Adapter]:
        """Forbids changes of the old version's LoRA adapters, and returns them. Raises ModelStateError if one of them
        is being loaded.
        """
        return self._old.engine.adapters.freeze()

    def thaw_adapters(self) -> None:
        """Permits changes of the old version's LoRA adapters again, if the old version still serves."""
        if not self._has_ended and self._model.version is self._old:
            self._old.engine.adapters.thaw()

    async def check_adapters(self, adapters: list[Adapter]) -> None:
        """Checks that the new version can use the LoRA adapters of the old version. The check runs before the old
        version ends, because the new version may load the adapters only after that.

        Raises ModelStateError if the new version cannot use an adapter, or if the old version has ended meanwhile.
        """
        try:
            await self._transitions.starter.check_adapters(adapters, self._next.config)
        except AdapterError as error:
            raise ModelStateError(f"The model is not reloaded: {error}", code="model_invalid") from None
        if self._model.version is not self._old:
            raise ModelStateError(f"The model {self._model.name!r} has ended; send the command again.")

    def victims(self, *, drain_first: bool) -> list[ServedModel[V]] | None:
        """Returns the other models that must end, so that the old and the new version of this model fit into memory
        together.

        Returns None if the new version fits only after the end of the old version, because memory or free nodes are
        missing. Only ``drain_first`` permits this. Otherwise raises ModelStateError.
        """
        problem: ModelMemoryError | NoFreeNodeError
        try:
            victims = self._transitions.victims(self._model, self._next.need)
            self._check_free_nodes()
            return victims
        except (ModelMemoryError, NoFreeNodeError) as error:
            problem = error
        hint = ' Send {"drain_first": true} to end the old version before the new one starts.'
        if drain_first:
            try:
                others = self._transitions.victims(self._model, self._next.need, without_own=True)
            except ModelMemoryError as error:
                problem, hint = error, ""
            else:
                if not others:
                    return None
                names = ", ".join(repr(other.name) for other in others)
                hint = f" A reload with drain_first ends no other model. First put these models to sleep: {names}."
        code = "model_nodes" if isinstance(problem, NoFreeNodeError) else "model_memory"
        raise ModelStateError(f"The model is not reloaded: {problem}.{hint}", code=code)

    def _check_free_nodes(self) -> None:
        """Raises NoFreeNodeError if the agents of the new version would wait for nodes that the old version uses."""
        engine, parallel = self._old.engine, self._next.config.parallel_config
        needed = parallel.nodes_per_replica
        if engine.nodes is None:
            return
        num_free = num_free_together(engine.nodes.status(), [pool.name for pool in parallel.pools or ()])
        if num_free < needed:
            nodes, are = "node" if needed == 1 else "nodes", "is" if num_free == 1 else "are"
            raise NoFreeNodeError(
                f"the first replica of the new version needs {needed} free {nodes}, and {num_free} {are} free "
                f"({engine.nodes_text()})"
            )

    async def switch(self, victims: list[ServedModel[V]], adapters: list[Adapter]) -> None:
        """Starts the new version, with the ``adapters`` of the old version, while the old version serves. New requests
        then go to the new version.
        """
        transitions, model = self._transitions, self._model
        problem: str | None = None
        transitions.starting[model.name] = self._next.need
        ends = [transitions.end_for_other(victim) for victim in victims]
        try:
            if ends:
                await asyncio.wait(ends)
            version = await transitions.starter.start(
                *(self._next.config, model.take_number(), self._next.need),
                adapters=adapters,
                is_main=model.is_main,
            )
        except (LLMServingError, OSError) as error:
            problem = str(error)  # only the text: the error's traceback would keep the new engine in memory
        finally:
            del transitions.starting[model.name]
        if problem is not None:
            transitions.keep(asyncio.to_thread(return_free_memory))
            raise ModelStateError(f"The new version does not start, so the old one serves on: {problem}")
        is_old_alive = model.version is self._old
        model.config, model.need = self._next.config, self._next.need
        transitions.put(model, version)
        self._note()
        if is_old_alive:
            model.retired.append(self._old)
            model.retirement = transitions.keep(self._retire())

    async def exchange(self, adapters: list[Adapter]) -> None:
        """Ends the old version when its requests have completed, and then starts the new version with the ``adapters``
        of the old version. New requests wait meanwhile.
        """
        model = self._model
        model.state = ModelState.UNLOADING
        model.change = self._transitions.keep(self._end_then_start(adapters))
        await asyncio.wait((model.change,))
        # A task of its own, because the caller refers to the old version until this method has returned.
        self._transitions.keep(asyncio.to_thread(return_free_memory))
        if model.state is ModelState.FAILED:
            raise ModelStateError(f"The old version has ended, and the new one does not start: {model.error}")
        self._note()

    async def _end_then_start(self, adapters: list[Adapter]) -> None:
        transitions, model = self._transitions, self._model
        await self._old.drained()
        transitions.starting[model.name] = self._next.need
        try:
            await self._old.stop()
            if not model.is_main:  # the server's own handlers always need a version of the main model
                model.version = None
            del self._old
            self._has_ended = True
            model.config, model.need, model.tokenizer = self._next.config, self._next.need, None
            await transitions.load(model, ModelState.COLD, adapters)
        finally:
            del transitions.starting[model.name]
            model.change = None
            transitions.room.set()

    async def _retire(self) -> None:
        try:
            await self._old.drained()
            await self._old.stop()
            self._model.retired.remove(self._old)
        finally:
            self._model.retirement = None
        self._transitions.room.set()
        del self._old
        await asyncio.to_thread(return_free_memory)

    def _note(self) -> None:
        model = self._model
        model.num_reloads += 1
        seconds = round(self._transitions.clock() - self._began, 3)
        self._transitions.log.event(
            "model_reloaded", model=model.name, path=model.config.model_config.model_path, seconds=seconds
        )
