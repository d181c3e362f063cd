"""Compares the time that the draft model takes with the time that its drafts save, and stops a draft model that loses.

The expected gain of drafts may be wrong, for example after a change of the text. The balance adds up the measured costs
and gains of each step. So it limits the loss even if the expectation is wrong.
"""

from __future__ import annotations

SHARE = 0.01
"""The debt falls by this fraction of the time of each plain step. So over a long time, the draft model can lose at most
this fraction of the time.
"""
STAKE_STEPS = 16
"""The stake after a trial: the time of this number of plain steps."""


class Balance:
    """Two accounts of the draft model, in seconds: its debt and its stake.

    The debt is the time that the draft model has lost and that gains or plain steps have not paid for yet. The stake is
    the time that it may still lose before it must rest. A plain step verifies no drafts of the draft model and makes
    none.
    """

    def __init__(self) -> None:
        self._debt_s = 0.0
        self._stake_s = 0.0

    @property
    def is_paid(self) -> bool:
        """True if gains or plain steps have paid for all losses. Only then may a trial begin."""
        return self._debt_s <= 0.0

    @property
    def is_lost(self) -> bool:
        """True if the draft model has lost more than its stake. Then it must rest until the next trial."""
        return self._stake_s < 0.0

    def pay(self, plain_s: float) -> None:
        """Reduces the debt after a plain step, which took ``plain_s``."""
        self._debt_s = max(0.0, self._debt_s - SHARE * plain_s)

    def add(self, loss_s: float, plain_s: float) -> None:
        """Adds the loss of a step. A negative loss is a gain. ``plain_s`` is the time of a plain step.

        Gains pay for earlier losses, but not for later losses. So a draft model that begins to lose is stopped equally
        soon, however much it has gained before.
        """
        self._debt_s = max(0.0, self._debt_s + loss_s)
        self._stake_s = min(self._stake_s - loss_s, STAKE_STEPS * plain_s)

    def renew_stake(self, plain_s: float) -> None:
        """Sets the stake to its full size. Call this method after each step of a trial, because the loss of a trial
        does not reduce the stake.
        """
        self._stake_s = STAKE_STEPS * plain_s
