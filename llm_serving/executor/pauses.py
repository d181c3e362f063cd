"""Measures the pauses of this process, so that the deadlines for the agents' replies can be extended by these pauses.

SIGSTOP, a debugger, ``docker pause`` or a virtual machine can pause this process while the clock continues. Without a
correction, all deadlines would be over after the pause, although this process has not read the agents' replies.
"""

from __future__ import annotations

COUNTED_S = 1.0
"""Maximum seconds between two calls of ``PauseWatch.look`` that count as time in which this process ran. Any time
beyond this maximum counts as a pause.
"""


class PauseWatch:
    """Finds the pauses of this process by the time between two calls of ``look``.

    A call that comes late only because the machine is busy also counts as a pause, for the time beyond ``COUNTED_S``.
    This is intended: the agents may have waited for a processor, too.
    """

    def __init__(self) -> None:
        self._looked_at: float | None = None

    @property
    def next_look(self) -> float | None:
        """The latest time of the next ``look``, by the caller's clock. None after ``rest``, until the next ``look``."""
        return None if self._looked_at is None else self._looked_at + COUNTED_S / 2

    def begin(self, now: float) -> None:
        """Begins a measurement if none is in progress. Call this method when a deadline begins.

        Without this call, a pause before the first ``look`` would not be found.
        """
        if self._looked_at is None:
            self._looked_at = now

    def look(self, now: float) -> float:
        """Returns the seconds of pause since the last call. 0.0 in the first call after ``rest``."""
        before, self._looked_at = self._looked_at, now
        return 0.0 if before is None else max(0.0, now - before - COUNTED_S)

    def rest(self) -> None:
        """Ends the measurement until the next ``look``. Call this method while no deadline runs."""
        self._looked_at = None
