"""Finds a device that often draws other tokens than the host's sampler (``agent.run_ahead``)."""

from __future__ import annotations

from llm_serving.scheduler.output import StepResult

WINDOW = 500
"""Number of steps in a group. Only steps that were launched with tokens from the device's sampler count."""
MAX_SHARE = 0.05
"""If a larger share of the steps in a group is launched twice, a warning follows. A second launch takes the time of a
step.
"""


class DrawWatch:
    """Counts how many steps of one replica were launched twice, because the device had drawn a wrong token. Each group
    of ``window`` consecutive steps is counted separately.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self.window = window
        self._steps = self._second_launches = 0
        self._was_above = False

    def note(self, result: StepResult) -> int:
        """Counts a step whose result has ``device_draws``.

        If the step completes a group with too many second launches, returns their number, otherwise 0. Also returns 0
        if the group before had too many second launches, so that a lasting problem is reported once.
        """
        self._steps += 1
        self._second_launches += result.wrong_draws > 0
        if self._steps < self.window:
            return 0
        found, was_above = self._second_launches, self._was_above
        self._was_above = found > MAX_SHARE * self.window
        self._steps = self._second_launches = 0
        return found if self._was_above and not was_above else 0
