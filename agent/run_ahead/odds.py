"""Decides when the device draws tokens of sequences without ``top_k``.

The drawn token may be none of the device's candidates. Then the device cannot draw it, and the next step must be
launched again. A second launch takes the time of a step on the device, and a launch ahead saves the time of the host.
The share of steps with a wrong token grows with the number of sequences. So the device draws only if this share is
small.
"""

from __future__ import annotations

MAX_SHARE = 0.25
"""Largest expected share of second launches. The host's time must be at least this part of the device's time for a step
to make a launch ahead worth it."""
_RATE = 0.02
"""Weight of a draw in the moving average."""
_PROBED = 64
"""If the share is too large, the device still draws in one of ``_PROBED`` steps, so that a change is noticed."""


class DrawOdds:
    """Estimates how often the token of a sequence without ``top_k`` is none of the candidates.

    The estimate decides only about the time at which a step is launched, and never about a token.
    """

    def __init__(self) -> None:
        self._misses = 0.0
        """The moving average of wrong draws, from 0 to 1."""
        self._waited = 0

    def allow(self, num_seqs: int) -> bool:
        """Returns whether the device draws the tokens of ``num_seqs`` sequences without ``top_k`` in a step."""
        if 1 - (1 - self._misses) ** num_seqs <= MAX_SHARE:
            self._waited = 0
            return True
        self._waited = (self._waited + 1) % _PROBED
        return self._waited == 0

    def note(self, num_draws: int, num_wrong: int) -> None:
        """Records the number of draws of a step, and how many of them were wrong."""
        if num_draws:
            weight = 1 - (1 - _RATE) ** num_draws
            self._misses += weight * (num_wrong / num_draws - self._misses)
