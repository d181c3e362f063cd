"""The results of a launched graph, and how the host fetches some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from agent.weights.storage import Array

OnDevice = Any
"""A result of a graph: a tensor of MindSpore. A step that was replayed without MindSpore has NumPy arrays instead."""


class Launch:
    """The results of one run of a graph. This base class is for devices that complete the results before the run
    returns.

    If ``DeviceTraits.runs_ahead`` is True, the device has a subclass whose results arrive after the run has returned.
    Every method may raise the errors of the run.
    """

    def __init__(self, results: tuple[OnDevice, ...], fetched: slice) -> None:
        self._results, self._fetched = results, fetched

    def results(self) -> tuple[OnDevice, ...]:
        """Returns the results on the device. A later launch may take them as inputs."""
        return self._results

    def fetch(self) -> tuple[Array, ...]:
        """Waits for the results that were selected at the launch, and returns them as arrays on the host.

        bfloat16 is returned as uint16.
        """
        return tuple(map(as_array, self._results[self._fetched]))

    def when_fetched(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once, as soon as ``fetch`` would no longer wait. The call may happen in any thread."""
        callback()


def as_array(value: OnDevice) -> Array:
    """Waits until the value is computed and returns it as an array. bfloat16 is returned as uint16."""
    from agent.layers.parameter import as_storage  # imports mindspore

    array: Array = value if isinstance(value, np.ndarray) else as_storage(value)
    return array
