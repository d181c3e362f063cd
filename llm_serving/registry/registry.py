"""The registry of all models. Requests get leases of their models here, and commands start and end models.

A model is started for the first request that names it. The arbiter decides before each start which idle models lose
their memory. All methods run on the event loop, unless they say otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from llm_serving.errors import ModelMemoryError, ModelStateError, ModelUnavailableError
from llm_serving.registry.arbiter import Arbiter
from llm_serving.registry.freeing import return_free_memory
from llm_serving.registry.planned import PlannedModel
from llm_serving.registry.reloading import reload
from llm_serving.registry.served_model import ModelStatus, ServedModel
from llm_serving.registry.starting import VersionStarter
from llm_serving.registry.states import ModelState
from llm_serving.registry.transitions import Transitions
from llm_serving.registry.version import Lease, RunningVersion
from llm_serving.telemetry.log import EventLog

V = TypeVar("V")

RETRY_FAILED_S = 15.0
"""After a failed start, requests for the model are refused for this number of seconds. The first request after this
time starts the model again.
"""
_UNKNOWN_START_S = 10.0
"""Value of ``Retry-After``, in seconds, for a model that was never started."""


class ModelRegistry(Generic[V]):
    """All models of a server. The first one is the main model: it serves as long as the server runs."""

    def __init__(
        self,
        models: Sequence[PlannedModel],
        main: RunningVersion[V],
        starter: VersionStarter[V],
        arbiter: Arbiter,
        log: EventLog,
        *,
        max_wait_s: float = 120.0,
        idle_unload_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        note_main: Callable[[V], None] = lambda view: None,
    ) -> None:
        """``main`` is the running version of the first model. ``max_wait_s``: maximum seconds that a request waits for
        its model.

        ``idle_unload_s``: seconds without requests after which a model that is not pinned is unloaded. None: never.
        ``note_main`` is called with the view of each new version of the main model.
        """
        self.models = [ServedModel[V](model, is_main=not index) for index, model in enumerate(models)]
        self._max_wait_s = max_wait_s
        self._idle_unload_s = idle_unload_s
        self._clock = clock
        self._transitions = Transitions(self.models, starter, arbiter, log, clock, note_main)
        self.models[0].take_number()
        self._transitions.put(self.models[0], main)

    @property
    def main(self) -> RunningVersion[V]:
        """The version of the main model to which new requests go."""
        version = self.models[0].version
        assert version is not None, "the main model always has a version"
        return version

    @property
    def has_several(self) -> bool:
        return len(self.models) > 1

    @property
    def ended(self) -> asyncio.Event:
        """An event that is set when the main model has ended by itself or cannot be started again."""
        return self._transitions.ended

    @property
    def end_reason(self) -> str:
        """The reason why the main model has ended."""
        return self.models[0].error

    def find(self, name: str | None) -> ServedModel[V] | None:
        """Returns the model with this name, or with an adapter of this name. ``name=None`` stands for the main model.

        Returns None if the name is unknown.
        """
        if name is None:
            return self.models[0]
        return next((model for model in self.models if model.knows(name)), None)

    def is_model(self, name: str) -> bool:
        """Returns True if ``name`` is the name of a model, False if it is the name of an adapter or unknown."""
        return any(model.name == name for model in self.models)

    def statuses(self) -> list[ModelStatus]:
        """Returns the state of each model."""
        return [model.status() for model in self.models]

    def begin(self) -> None:
        """Starts the pinned models and the task that unloads idle models. Call this when the main model is ready."""
        self._transitions.starter.begin_checks(self.main)
        for model in self.models[1:]:
            if model.is_pinned:
                self._transitions.start(model)
        if self._idle_unload_s is not None and self.has_several:
            self._transitions.keep(self._unload_idle(self._idle_unload_s))

    async def close(self) -> None:
        """Ends all models."""
        await self._transitions.close()

    async def acquire(self, model: ServedModel[V], deadline_s: float | None = None) -> Lease[V]:
        """Returns a lease of a model. If the model is not in memory, starts the model and waits.

        Raises ModelUnavailableError if the model is not ready within the smaller of ``max_wait_s`` and ``deadline_s``
        seconds. Raises it immediately if the start is expected to take longer.
        """
        limit = self._max_wait_s if deadline_s is None else min(deadline_s, self._max_wait_s)
        until = self._clock() + limit
        while model.version is None or model.state is not ModelState.READY:
            self._check_wait(model, until - self._clock())
            try:
                change = model.change or self._transitions.start(model)
            except ModelMemoryError as error:
                await self._wait_for_room(model, until, error)
                continue
            await asyncio.wait((change,), timeout=max(0.0, until - self._clock()))
            if not change.done():
                raise _unavailable(model, f"was not ready within {limit:g} s")
        model.last_used = self._clock()
        return model.version.lease()

    async def start(self, model: ServedModel[V]) -> None:
        """Starts a model if it is not in memory, and waits until it is ready. Raises ModelStateError if it does not fit
        or does not start.
        """
        while model.version is None or model.state is not ModelState.READY:
            try:
                change = model.change or self._transitions.start(model)
            except ModelMemoryError as error:
                raise ModelStateError(f"The model is not started: {error}.", code="model_memory") from None
            await asyncio.wait((change,))
            if model.state is ModelState.FAILED:
                raise ModelStateError(f"The model {model.name!r} does not start: {model.error}")

    async def end(self, model: ServedModel[V], after: ModelState) -> None:
        """Ends a model after it has completed its requests. ``after`` is its final state: ``SLEEPING`` or ``COLD``.

        Also waits for the end of a version that a reload has replaced. Raises ModelStateError for the main model, and
        while the model is being reloaded.
        """
        if model.is_main:
            raise ModelStateError(f"The model {model.name!r} is the main model, which serves as long as the server.")
        while (task := model.change or model.retirement) is not None:
            await asyncio.wait((task,))
        if model.is_reloading or model.retired:
            raise ModelStateError(f"The model {model.name!r} is being reloaded; send the command again later.")
        if model.state is ModelState.READY:
            await asyncio.wait((self._transitions.end(model, after),))
        elif after is ModelState.COLD or model.state is ModelState.FAILED:
            model.state, model.tokenizer, model.error = ModelState.COLD, None, ""
            await asyncio.to_thread(return_free_memory)

    async def reload(self, model: ServedModel[V], path: str | None, *, drain_first: bool) -> None:
        """Replaces the version of a model by one with the present files, or those in ``path``.

        With ``drain_first``, the old version may end before the new one starts. Raises ModelStateError if the model
        cannot be reloaded. ``reloading.reload`` describes the steps.
        """
        await reload(self._transitions, model, path, drain_first=drain_first)

    def _check_wait(self, model: ServedModel[V], left_s: float) -> None:
        """Raises ModelUnavailableError if the model's last start failed recently, or if it cannot be ready within
        ``left_s`` seconds.
        """
        expected, failed = model.expected_s, model.failed_at
        if model.state is ModelState.FAILED and failed is not None and self._clock() - failed < RETRY_FAILED_S:
            raise _unavailable(model, "could not be started; the server's log has the reason", RETRY_FAILED_S)
        if left_s <= 0 or (expected is not None and expected > left_s and model.change is None):
            known = "" if expected is None else f", and a start takes about {expected:.1f} s"
            raise _unavailable(model, f"is not in memory{known}; the request may wait {max(0.0, left_s):.1f} s")

    async def _wait_for_room(self, model: ServedModel[V], until: float, error: ModelMemoryError) -> None:
        """Waits until another model has freed memory.

        At the time ``until``, raises ModelUnavailableError with the text of ``error``.
        """
        self._transitions.room.clear()
        try:
            await asyncio.wait_for(self._transitions.room.wait(), max(0.0, until - self._clock()))
        except asyncio.TimeoutError:
            raise _unavailable(model, f"does not fit into the memory now: {error}") from None

    async def _unload_idle(self, idle_s: float) -> None:
        """Unloads each model that was idle for ``idle_s`` seconds, except pinned models. Never returns."""
        while True:
            await asyncio.sleep(min(idle_s, 1.0) / 2)
            for model in self.models:
                if model.is_idle and not model.is_pinned and self._clock() - model.last_used >= idle_s:
                    self._transitions.end(model, ModelState.COLD)


def _unavailable(model: ServedModel[V], problem: str, retry_after_s: float | None = None) -> ModelUnavailableError:
    seconds = retry_after_s or model.expected_s or _UNKNOWN_START_S
    return ModelUnavailableError(f"The model {model.name!r} {problem}. Try again later.", retry_after_s=seconds)
