"""Takes the pauses of this process out of the time that it measures by the clock.

SIGSTOP, a debugger, ``docker pause`` or a virtual machine can pause this process. The clock runs on. After
the pause, each deadline of the agents would be over, although this process has not read their replies.
"""

from __future__ import annotations

COUNTED_S = 1.0
"""Maximum seconds between two looks that count. A process that runs looks more often."""


class PauseWatch:
    """Finds the pauses of this process by the time between two calls of ``look``.

    If the machine is so busy that a thread looks late, the time beyond ``COUNTED_S`` counts as a pause, too. The agents
    may also have waited for a processor meanwhile.
    """

    def __init__(self) -> None:
        self._looked_at: float | None = None

    @property
    def next_look(self) -> float | None:
        """The latest time of the next ``look``, by the caller's clock. None while this object rests."""
        return None if self._looked_at is None else self._looked_at + COUNTED_S / 2

    def look(self, now: float) -> float:
        """Returns the seconds since the last call that do not count. 0.0 after a ``rest``."""
        before, self._looked_at = self._looked_at, now
        return 0.0 if before is None else max(0.0, now - before - COUNTED_S)

    def rest(self) -> None:
        """Ends the measurement until the next ``look``. Call this method while no deadline runs."""
        self._looked_at = None
