"""Starts and ends models. Each start or end is a task, so that all requests for a model can wait for the same task."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from llm_serving.errors import LLMServingError
from llm_serving.lora.registry import Adapter
from llm_serving.registry.arbiter import Arbiter, Claim, Need
from llm_serving.registry.freeing import return_free_memory
from llm_serving.registry.served_model import ServedModel
from llm_serving.registry.starting import VersionStarter
from llm_serving.registry.states import ModelState
from llm_serving.registry.version import RunningVersion
from llm_serving.telemetry.log import EventLog

V = TypeVar("V")


class Transitions(Generic[V]):
    """Starts and ends models, and tracks the memory of each model. Only the event loop's thread may use this object."""

    def __init__(
        self,
        models: Sequence[ServedModel[V]],
        starter: VersionStarter[V],
        arbiter: Arbiter,
        log: EventLog,
        clock: Callable[[], float] = time.monotonic,
        note_main: Callable[[V], None] = lambda view: None,
    ) -> None:
        self.models = models
        self.starter = starter
        self.log = log
        self.clock = clock
        self.room = asyncio.Event()
        """An event that is set when a model has become idle, has started or has ended. A start that waits for memory
        must then check again whether the memory suffices.
        """
        self.ended = asyncio.Event()
        """An event that is set when the engine of the main model has ended by itself."""
        self.starting: dict[str, Need] = {}
        """Memory of the versions that are being started, by the model's name."""
        self._arbiter = arbiter
        self._note_main = note_main
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, model: ServedModel[V]) -> asyncio.Task[None]:
        """Creates a task that starts a model, which must not be in memory. The task never raises.

        The model's state shows the result. Raises ModelMemoryError if the memory is too small now.
        """
        victims = self.victims(model, model.need)
        before, model.state = model.state, ModelState.LOADING
        self.starting[model.name] = model.need
        ends = [self.end_for_other(victim) for victim in victims]
        model.change = self.keep(self._start(model, before, ends))
        return model.change

    def end(self, model: ServedModel[V], after: ModelState) -> asyncio.Task[None]:
        """Creates a task that ends a model after its requests have completed. The task never raises.

        New requests wait from now on. ``after`` is the model's final state: ``SLEEPING`` or ``COLD``.
        """
        model.state = ModelState.UNLOADING
        model.change = self.keep(self._end(model, after))
        return model.change

    def end_for_other(self, model: ServedModel[V]) -> asyncio.Task[None]:
        """Puts an idle model to sleep, because another model needs its memory.

        The other model already claims this memory. So ``_claims`` no longer counts a claim of the idle model.
        """
        model.is_victim = True
        return self.end(model, ModelState.SLEEPING)

    def victims(self, model: ServedModel[V], need: Need, *, without_own: bool = False) -> list[ServedModel[V]]:
        """Returns the models that must end before a version of ``model`` with the memory ``need`` can start.

        ``without_own``: the present version of ``model`` ends before that start, so its memory is free. Raises
        ModelMemoryError if the memory is too small.
        """
        claims = [claim for claim in self._claims() if not (without_own and claim.name == model.name)]
        names = {claim.name for claim in self._arbiter.make_room(model.name, need, claims)}
        return [each for each in self.models if each.name in names]

    def put(self, model: ServedModel[V], version: RunningVersion[V]) -> None:
        """Makes ``version``, which is ready, the version that gets the new requests of ``model``."""
        model.version, model.state, model.error, model.failed_at = version, ModelState.READY, "", None
        model.tokenizer = version.engine.tokenizer
        model.last_used = self.clock()
        for observer in version.engine.observers:
            observer.enter_service()
        version.on_idle = lambda: self._note_idle(model)
        if model.is_main:
            self._note_main(version.view)
        self.keep(self._watch(model, version))

    async def load(self, model: ServedModel[V], before: ModelState, adapters: Sequence[Adapter] = ()) -> None:
        """Starts a model with its present config and ``adapters``, and measures how long that takes. The memory must
        already be reserved.

        If the start fails, the model's state is ``FAILED``, and ``error`` is the reason.
        """
        began = self.clock()
        try:
            version = await self.starter.start(
                *(model.config, model.take_number(), model.need),
                tokenizer=model.tokenizer,
                adapters=adapters,
                is_main=model.is_main,
            )
        except (LLMServingError, OSError) as error:
            self.fail(model, str(error))
            return
        except Exception as error:
            self.fail(model, f"internal error: {error!r}", traceback=traceback.format_exc())
            return
        self.put(model, version)
        model.num_starts += 1
        seconds = self.clock() - began
        model.costs.note(before, seconds)
        self.log.event("model_started", model=model.name, before=before.value, seconds=round(seconds, 3))

    def fail(self, model: ServedModel[V], error: str, **details: str) -> None:
        """Marks a model as failed, because it does not start or its engine has ended by itself. ``details`` go to the
        log only.
        """
        model.state, model.error, model.failed_at = ModelState.FAILED, error, self.clock()
        if model.is_main:
            self.ended.set()  # the server then ends, and logs why
        else:
            self.log.error(error, event="model_failed", model=model.name, **details)

    def keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine as a task, and keeps a reference to the task until the task ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Ends all models and all tasks. Starts that are in progress end with an error."""
        self.starter.is_closing = True
        changes = [model.change for model in self.models if model.change is not None]
        versions = [version for model in self.models for version in (*model.retired, model.version) if version]
        await asyncio.gather(*(version.stop() for version in versions), *changes, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _start(self, model: ServedModel[V], before: ModelState, ends: Sequence[asyncio.Task[None]]) -> None:
        try:
            if ends:
                await asyncio.wait(ends)
            await self.load(model, before)
        finally:
            del self.starting[model.name]
            model.change = None
            self.room.set()
        if model.state is ModelState.FAILED:
            self.keep(asyncio.to_thread(return_free_memory))

    async def _end(self, model: ServedModel[V], after: ModelState) -> None:
        version = model.version
        assert version is not None, "only a model that serves can end"
        try:
            await version.drained()
            await version.stop()
        finally:
            del version
            model.version, model.state, model.change, model.is_victim = None, after, None, False
            if after is ModelState.COLD:
                model.tokenizer = None
            self.room.set()
        await asyncio.to_thread(return_free_memory)
        self.log.event("model_ended", model=model.name, state=after.value)

    async def _watch(self, model: ServedModel[V], version: RunningVersion[V]) -> None:
        """Waits for the end of a version's engine. If the engine ends by itself, for example after too many restarts of
        its agents, marks the model as failed.
        """
        await version.engine.ended.wait()
        if version.is_stopping:
            return
        if model.version is version:
            self.fail(model, version.engine.stop_reason)
            if model.is_main:
                return  # the server ends, and with it this version
            model.version = None
        await version.stop()
        self.room.set()
        del version
        await asyncio.to_thread(return_free_memory)

    def _claims(self) -> list[Claim]:
        """Returns the memory claims of all versions that run, start or end.

        A model that ends because another model needs its memory is left out: the other model already claims this
        memory.
        """
        claims = [Claim(name, need, 0.0, may_sleep=False) for name, need in self.starting.items()]
        for model in self.models:
            claims += [Claim(model.name, each.need, 0.0, may_sleep=False) for each in model.retired]
            if model.version is not None and not model.is_victim:
                may_sleep = model.is_idle and not model.is_pinned
                claims.append(Claim(model.name, model.version.need, model.last_used, may_sleep))
        return claims

    def _note_idle(self, model: ServedModel[V]) -> None:
        model.last_used = self.clock()
        self.room.set()
