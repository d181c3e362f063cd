"""A scheduler as the engine sees it: where requests go in, and where steps come out.

``Scheduler`` is both at once. With several replicas of the model requests go in at one place, the ``Router``, and
steps come out at one place for each replica (``llm_serving.routing``).
"""

from __future__ import annotations

from typing import Protocol

from llm_serving.errors import QueueFullError
from llm_serving.request import FinishReason, Request
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult

__all__ = ["Figures", "RequestFront", "StepSource"]


class Figures(Protocol):
    """What others look at; any thread may, at numbers a step apart from one another. See ``SchedulerFigures``."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_swapped(self) -> int: ...

    @property
    def num_preemptions(self) -> int: ...

    @property
    def num_swaps(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def kv_waste(self) -> float: ...

    @property
    def prefix_query_tokens(self) -> int: ...

    @property
    def prefix_hit_tokens(self) -> int: ...


class RequestFront(Protocol):
    """Where requests go in, and are ended from outside. See ``Scheduler``."""

    @property
    def figures(self) -> Figures: ...

    @property
    def is_idle(self) -> bool: ...

    def add_request(self, request: Request) -> None: ...

    def queue_full(self) -> QueueFullError | None: ...

    def finish_request(self, request_id: str, reason: FinishReason, now: float) -> RequestUpdate | None: ...

    def abort_request(self, request_id: str, now: float) -> RequestUpdate | None: ...

    def fail_all(self, error: str, now: float) -> list[RequestUpdate]: ...

    def take_ended(self) -> list[RequestUpdate]: ...

    def check_integrity(self) -> None: ...


class StepSource(Protocol):
    """Where the steps of one replica come from, and their answers go. See ``Scheduler``."""

    @property
    def figures(self) -> Figures: ...

    def schedule(self, now: float) -> ScheduledStep | None: ...

    def next_wakeup(self, now: float) -> float | None: ...

    def update(self, result: StepResult, now: float) -> list[RequestUpdate]: ...

    def void_steps(self) -> list[int]: ...

    def agent_lost(self, now: float) -> None: ...
