"""Who watches the engine: the event log and the metrics, as the engine sees them.

Everything here is called at most once a step (by the engine thread) or once a request (by the event loop), and must
not block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from llm_serving.request import FinishReason, RequestOutput, RequestTimings
from llm_serving.scheduler.output import ScheduledStep, StepResult

__all__ = ["EngineLog", "EngineMetrics"]


class EngineLog(Protocol):
    """The part of ``llm_serving.telemetry.log.EventLog`` the engine uses: one line per call."""

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
        """A streamed request's first output was written to its socket ``seconds`` after it arrived."""

    def request_end(self, output: RequestOutput, reason: FinishReason, timings: RequestTimings) -> None:
        """A request ended and its answer was delivered; ``output`` is its last piece, with the token counts."""

    def host_overhead(self, seconds: float) -> None:
        """So long the device had nothing to do after a step because the host was not ready; 0 for most steps."""

    def request_refused(self, code: str) -> None:
        """A request was refused at the door; ``code`` is the ``RequestError``'s."""

    def preemptions(self, count: int, swaps: int) -> None:
        """So many requests lost their blocks since the last call, ``swaps`` of them to host memory."""

    def objectives(self, met: Mapping[str, bool]) -> None:
        """A request ended that had objectives: for each, and for all of them together, whether it was met."""
