"""Compares the time that the draft model takes with the time that its drafts save, and stops a draft model that loses.

The expected gain of drafts may be wrong, for example after a change of the text. The balance counts what each step cost
and gained, so it limits the loss whatever was expected.
"""

from __future__ import annotations

SHARE = 0.01
"""Fraction of the time of plain steps that pays for losses of the draft model. It bounds the loss of a long run."""
STAKE_STEPS = 16
"""Time that the draft model may lose after a trial until the next trial, in plain steps. Gains restore it."""


class Balance:
    """The loss of the draft model that plain steps must still pay for, and the loss that it may still make.

    All times are seconds. A plain step verifies no drafts of the draft model and makes none.
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
        """Pays for losses with a share of the time of a plain step."""
        self._debt_s = max(0.0, self._debt_s - SHARE * plain_s)

    def add(self, loss_s: float, plain_s: float) -> None:
        """Adds the loss of a step. A negative loss is a gain. ``plain_s`` is the time of a plain step.

        Gains pay for earlier losses, but not for later losses. So a draft model that begins to lose is stopped equally
        soon, however much it has gained before.
        """
        self._debt_s = max(0.0, self._debt_s + loss_s)
        self._stake_s = min(self._stake_s - loss_s, STAKE_STEPS * plain_s)

    def renew_stake(self, plain_s: float) -> None:
        """Lets the draft model lose a new stake. Call this method at the end of a trial."""
        self._stake_s = STAKE_STEPS * plain_s
