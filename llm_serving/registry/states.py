"""The states of a model, and an estimate of the time that its start takes."""

from __future__ import annotations

import enum

_WEIGHT_OF_LATEST = 0.5
"""Weight of the latest start in the mean of the seconds that a model's start takes."""


class ModelState(enum.Enum):
    """The state of a model. In the state ``READY``, the model can serve."""

    COLD = "cold"
    """State of a model without agents and without a tokenizer in memory."""
    LOADING = "loading"
    READY = "ready"
    SLEEPING = "sleeping"
    """State of a model whose agents have ended, while the server process keeps the tokenizer."""
    UNLOADING = "unloading"
    """State of a model that completes its requests before its agents end."""
    FAILED = "failed"
    """State of a model whose last start failed, or whose engine ended by itself. The next request or command starts the
    model again."""


class StartCosts:
    """Estimates the seconds of a start from ``COLD`` and from ``SLEEPING``: weighted means, in which the latest start
    has half of the weight.
    """

    def __init__(self) -> None:
        self._seconds: dict[ModelState, float] = {}

    def note(self, before: ModelState, seconds: float) -> None:
        """Updates the estimate with the seconds of a start. ``before`` is the model's state before the start."""
        kind = _kind(before)
        old = self._seconds.get(kind, seconds)
        self._seconds[kind] = old + _WEIGHT_OF_LATEST * (seconds - old)

    def expected_s(self, state: ModelState) -> float | None:
        """Returns the expected seconds of a start from ``state``. None before the first start.

        If the model has only been started from the other state, returns the time of those starts.
        """
        known = self._seconds.get(_kind(state))
        return next(iter(self._seconds.values()), None) if known is None else known


def _kind(state: ModelState) -> ModelState:
    return ModelState.SLEEPING if state is ModelState.SLEEPING else ModelState.COLD
