"""Who watches the engine: the event log and the metrics, as the engine sees them.

Everything here is called by the engine thread, at most once a step or once a request, and must not block.
"""

from __future__ import annotations

from typing import Protocol

from llm_serving.request import FinishReason, RequestOutput
from llm_serving.scheduler.output import ScheduledStep, StepResult

__all__ = ["EngineLog", "EngineMetrics"]


class EngineLog(Protocol):
    """The part of ``llm_serving.log.EventLog`` the engine uses: one line per call."""

    def event(self, name: str, /, *, level: str = ..., **fields: object) -> None: ...

    def info(self, message: str, /, *, event: str = ..., **fields: object) -> None: ...

    def warning(self, message: str, /, *, event: str = ..., **fields: object) -> None: ...

    def error(self, message: str, /, *, event: str = ..., **fields: object) -> None: ...


class EngineMetrics(Protocol):
    """Counters and histograms of the engine. What has a present value (running, waiting, free blocks) is read
    from ``AsyncEngine.status()`` when it is asked for, and is not pushed here."""

    def step(self, step: ScheduledStep, result: StepResult, seconds: float) -> None:
        """A step was answered ``seconds`` after it was submitted."""

    def first_token(self, seconds: float) -> None:
        """A request got its first token ``seconds`` after it arrived."""

    def request_end(self, output: RequestOutput, reason: FinishReason) -> None:
        """A request ended; ``output`` is its last piece, with the timings and the token counts."""

    def request_refused(self, code: str) -> None:
        """A request was refused at the door; ``code`` is the ``RequestError``'s."""

    def preemptions(self, count: int) -> None:
        """So many requests were preempted since the last call."""
