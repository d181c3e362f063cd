"""The states of a served model, and what its starts have cost."""

from __future__ import annotations

import enum

_WEIGHT_OF_LATEST = 0.5


class ModelState(enum.Enum):
    """The state of a model, which shows whether the model can serve now."""

    COLD = "cold"
    """State of a model of which nothing is in memory."""
    LOADING = "loading"
    READY = "ready"
    SLEEPING = "sleeping"
    """State of a model whose agents have ended, while the server process keeps the tokenizer."""
    UNLOADING = "unloading"
    """State of a model that completes its requests. Then its agents end."""
    FAILED = "failed"
    """State of a model whose last start failed, or whose engine ended by itself. The next request or command starts the
    model again."""


class StartCosts:
    """The learnt time of starts: from cold and from sleep. A mean in which the latest start has half of the weight."""

    def __init__(self) -> None:
        self._seconds: dict[ModelState, float] = {}

    def note(self, before: ModelState, seconds: float) -> None:
        """Learn from a start. ``before`` is the model's state before the start."""
        kind = _kind(before)
        old = self._seconds.get(kind, seconds)
        self._seconds[kind] = old + _WEIGHT_OF_LATEST * (seconds - old)

    def expected_s(self, state: ModelState) -> float | None:
        """Return the expected seconds of a start from ``state``. None if no start was seen.

        If only the other kind of start was seen, its time is the estimate.
        """
        known = self._seconds.get(_kind(state))
        return next(iter(self._seconds.values()), None) if known is None else known


def _kind(state: ModelState) -> ModelState:
    return ModelState.SLEEPING if state is ModelState.SLEEPING else ModelState.COLD
