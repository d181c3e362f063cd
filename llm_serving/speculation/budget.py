"""Limits the time for building drafts of requests with a constraint, for example an ambiguous grammar.

The engine thread builds drafts between steps, so all requests of the replica wait for this time.
"""

from __future__ import annotations

SHARE = 0.05
"""Fraction of a request's step time that building its drafts may take if no draft is right."""
MAX_CREDIT = 4.0
"""Maximum time that a request saves up for drafts, in multiples of the time of a token. It limits for how long wrong
drafts are built after right ones.
"""
MAX_REST = 128
"""Maximum number of decode steps for which no drafts are built for a request. It limits the effect of one slow
measurement, for example while the machine stalls.
"""


class BuildBudget:
    """The time that building the drafts of one request may take.

    Each decode step adds a share of its time. Each right draft adds the time of a token, because it saves this time.
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    @property
    def is_open(self) -> bool:
        """True if drafts may be built for the request. False until further steps have added enough time."""
        return self._seconds >= 0.0

    def earn(self, token_s: float, num_right: int) -> None:
        """Adds the time for drafts that a decode step with ``num_right`` right drafts earns.

        ``token_s`` is the time of a step without drafts, divided by its number of sequences.
        """
        rest_s = MAX_REST * SHARE * token_s
        self._seconds = min(max(self._seconds, -rest_s) + (SHARE + num_right) * token_s, MAX_CREDIT * token_s)

    def spend(self, seconds: float) -> None:
        """Subtracts the time that building drafts took."""
        self._seconds -= seconds
