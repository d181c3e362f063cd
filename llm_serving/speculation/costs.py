"""Estimates what a step with drafts costs and gains: the time of a step by its size, and the chance of each draft."""

from __future__ import annotations

FORCED = 9
"""Stands for a match length: the draft was forced by a constraint. Real matches are at most 8 tokens long."""
MODEL = 10
"""Stands for a match length: the draft model made the draft."""
_NEW = 0.2
"""Weight of a new measurement in a running mean."""
_OUTLIER = 1.5
"""A measurement counts as at most this multiple of the mean, so that a busy machine changes the mean slowly."""
_SLOPE = 0.06
"""Time of one more entry, as a fraction of a step's time, until it is measured. It is low, so that larger steps are
tried."""
_REFRESH_STEPS = 8
"""Number of steps after which the estimates are made again from the measurements."""
_STALE_STEPS = 512
"""A measurement is forgotten after this number of steps without a new one."""
_FIRST_CHANCE = {2: 0.05, 3: 0.15, 4: 0.3, 5: 0.45, 6: 0.6, 7: 0.7, 8: 0.8, FORCED: 0.9, MODEL: 0.6}
"""Chances before any draft was compared, by length of the match. Short matches are mostly chance, so they are compared
for some time before they are offered."""
_PRIOR_WEIGHT, _CLASS_DECAY, _OWN_DECAY = 4.0, 0.98, 0.85


class StepCosts:
    """The running mean of the time of decode steps, by their number of entries, and of the host's time between steps.

    Times are seconds.
    """

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, int]] = {}
        self._num_steps = 0
        self._estimates: dict[int, float | None] = {}
        """The results of ``seconds``, until the estimates are made again."""
        self.gap_s = 0.0
        """Time from the end of a step to the start of the next one, if the next one is not sent ahead."""

    def note(self, entries: int, device_s: float, total_s: float) -> bool:
        """Notes a decode step. ``total_s`` is the time from sending it to its result, without its time in a queue.

        Returns True if the estimates changed. They change every few steps, because making them takes time.
        """
        self._num_steps += 1
        changed = entries not in self._means or not self._num_steps % _REFRESH_STEPS
        if changed:
            self._estimates.clear()
        known = self._means.get(entries)
        mean = device_s if known is None else known[0]
        self._means[entries] = (mean + _NEW * (min(device_s, _OUTLIER * mean) - mean), self._num_steps)
        gap_s = max(0.0, total_s - device_s)
        self.gap_s += _NEW * (min(gap_s, _OUTLIER * self.gap_s if self.gap_s else gap_s) - self.gap_s)
        return changed

    def seconds(self, entries: int) -> float | None:
        """Returns the expected device time of a decode step, or None if no smaller step was measured."""
        if entries not in self._estimates:
            self._estimates[entries] = self._estimate(entries)
        return self._estimates[entries]

    def _estimate(self, entries: int) -> float | None:
        fresh = {size: mean for size, (mean, last) in self._means.items() if self._num_steps - last < _STALE_STEPS}
        if entries in fresh:
            return fresh[entries]
        below = max((size for size in fresh if size < entries), default=None)
        if below is None:
            return None
        guess = fresh[below] * (1 + _SLOPE * (entries - below))
        above = min((size for size in fresh if size > entries), default=None)
        return guess if above is None else min(guess, max(fresh[above], fresh[below]))


class Chances:
    """The fraction of right drafts, by the length of the match that led to them."""

    def __init__(self) -> None:
        self._counts = {match: (chance * _PRIOR_WEIGHT, _PRIOR_WEIGHT) for match, chance in _FIRST_CHANCE.items()}

    def note(self, match: int, is_right: bool) -> None:
        """Notes whether a draft was right, given that all drafts before it were right."""
        right, tried = self._counts[match]
        self._counts[match] = (right * _CLASS_DECAY + is_right, tried * _CLASS_DECAY + 1)

    def of(self, match: int) -> float:
        """Returns the fraction of right drafts."""
        right, tried = self._counts[match]
        return right / tried


class OwnChance:
    """The fraction of right drafts of one request, of which the latest count most."""

    def __init__(self) -> None:
        self._right = self._tried = 0.0

    def note(self, is_right: bool) -> None:
        self._right = self._right * _OWN_DECAY + is_right
        self._tried = self._tried * _OWN_DECAY + 1

    def mixed_with(self, chance: float) -> float:
        """Returns the chance of the request's next draft. ``chance`` is that of all requests."""
        return (self._right + _PRIOR_WEIGHT * chance) / (self._tried + _PRIOR_WEIGHT)
