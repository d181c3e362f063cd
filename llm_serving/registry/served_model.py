"""One model of the registry: its state, the version in memory, and the time that its starts take."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from llm_serving.config import Config
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.registry.arbiter import Need
from llm_serving.registry.planned import PlannedModel
from llm_serving.registry.states import ModelState, StartCosts
from llm_serving.registry.version import RunningVersion

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The present state of a model, for ``/v1/models`` and the metrics."""

    name: str
    state: str
    """A value of ``ModelState``."""
    pinned: bool
    wake_seconds: float | None
    """Expected seconds until the model serves. 0 if the model serves now, None before its first start."""
    memory_bytes: int
    """Planned memory of the versions in memory, in all pools."""
    requests: int
    """Number of HTTP requests that use the model now."""
    starts: int
    reloads: int
    error: str

    @property
    def is_serving(self) -> bool:
        return self.state == ModelState.READY.value

    def as_json(self) -> dict[str, Any]:
        """Returns the JSON members about the state, which ``/v1/models`` adds to the entry of the model."""
        wake = None if self.wake_seconds is None else round(self.wake_seconds, 3)
        members = {"state": self.state, "pinned": self.pinned, "wake_seconds": wake, "memory_bytes": self.memory_bytes}
        return {**members, "error": self.error} if self.error else members


class ServedModel(Generic[V]):
    """The state of one model. Only the registry changes it, on the event loop."""

    def __init__(self, planned: PlannedModel, *, is_main: bool) -> None:
        self.planned = planned
        self.config: Config = planned.config
        """The config with which the next start of the model begins."""
        self.need: Need = planned.need
        self.is_main = is_main
        self.state = ModelState.COLD
        self.version: RunningVersion[V] | None = None
        """The version that gets new requests. None while the model is not in memory."""
        self.retired: list[RunningVersion[V]] = []
        """Versions that a reload has replaced. They complete their requests."""
        self.retirement: asyncio.Task[None] | None = None
        """The task that ends the version in ``retired``, or None."""
        self.tokenizer: Tokenizer | None = None
        """The tokenizer that a sleeping model keeps."""
        self.change: asyncio.Task[None] | None = None
        """The task of the start or end that is in progress, or None."""
        self.is_reloading = False
        self.is_victim = False
        """True if the model ends because another model needs its memory."""
        self.last_used = 0.0
        self.failed_at: float | None = None
        self.error = ""
        """The reason why the last start failed. Empty after a start without an error."""
        self.costs = StartCosts()
        self.num_versions = 0
        self.num_starts = 0
        self.num_reloads = 0

    @property
    def name(self) -> str:
        return self.planned.name

    @property
    def is_pinned(self) -> bool:
        return self.planned.pinned or self.is_main

    @property
    def is_idle(self) -> bool:
        """True if the model serves, but no request uses it and no start, end or reload is in progress."""
        version, is_changing = self.version, self.is_reloading or self.change is not None or bool(self.retired)
        return self.state is ModelState.READY and version is not None and not version.num_leases and not is_changing

    @property
    def expected_s(self) -> float | None:
        """Expected seconds of a start from the present state. None before the first start."""
        return self.costs.expected_s(self.state)

    def take_number(self) -> int:
        """Returns the number for the next version of the model, from 0."""
        self.num_versions += 1
        return self.num_versions - 1

    def knows(self, name: str) -> bool:
        """Returns True if ``name`` is the model's name or the name of one of its adapters."""
        if name == self.name or (self.version is None and name in self.planned.adapter_names):
            return True
        return self.version is not None and self.version.engine.adapters.find(name) is not None

    def status(self) -> ModelStatus:
        """Returns the present state and figures of the model."""
        versions = [*self.retired, *([] if self.version is None else [self.version])]
        is_serving = self.state is ModelState.READY
        state = self.state.value
        if self.version is not None and is_serving and self.version.engine.state == "starting":
            state, is_serving = ModelState.LOADING.value, False
        wake_s = self.expected_s
        if self.version is not None and is_serving and (standby := self.version.engine.standby) is not None:
            wake_s, is_serving = self.version.engine.wake_s, standby.is_ready
            if not is_serving:
                state = (ModelState.LOADING if standby.is_wanted else ModelState.SLEEPING).value
        return ModelStatus(
            name=self.name,
            state=state,
            pinned=self.is_pinned,
            wake_seconds=0.0 if is_serving else wake_s,
            memory_bytes=sum(sum(version.need.values()) for version in versions),
            requests=sum(version.num_leases for version in versions),
            starts=self.num_starts,
            reloads=self.num_reloads,
            error=self.error,
        )
