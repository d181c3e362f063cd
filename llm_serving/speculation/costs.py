"""Estimates the time of a decode step from its number of entries, and the probability that a draft is right.

An entry is one input token of the step: a sequence with k drafts has 1 + k entries.
"""

from __future__ import annotations

FORCED = 9
"""Used as the match length of a draft that a constraint forces. Real match lengths are 2 to 8."""
MODEL = 10
"""Used as the match length of a draft that the draft model made."""
SEEN = 11
"""Used as the match length of a token that was sampled last at the same place of the grammar (``Places``)."""
REPEATED = 12
"""Used as the match length of a token that was sampled the last two times at the same place of the grammar."""
OF_GRAMMAR = frozenset({FORCED, SEEN, REPEATED})
"""Match lengths of drafts that follow from a grammar. The probability that they are right is estimated from all
requests' drafts of this kind, and not from the other drafts of the same request.
"""
_NEW = 0.2
"""Weight of a new measurement in a running mean."""
_OUTLIER = 1.5
"""Measurements are capped at this multiple of the mean, so that a busy machine changes the mean slowly."""
_SLOPE = 0.06
"""Assumed time by which one more entry makes a step longer, as a fraction of the step's time, until it is measured. The
value is low, so that larger steps are tried.
"""
_REFRESH_STEPS = 8
"""Number of steps after which the estimates are computed again from the measurements."""
_STALE_STEPS = 512
"""A measurement is forgotten after this number of steps without a new one."""
_FIRST_CHANCE = {2: 0.05, 3: 0.15, 4: 0.3, 5: 0.45, 6: 0.6, 7: 0.7, 8: 0.8, FORCED: 0.9, MODEL: 0.6}
_FIRST_CHANCE |= {SEEN: 0.5, REPEATED: 0.8}
"""Assumed probability that a draft is right, by the length of its match. It is used until drafts have been compared
with sampled tokens. Short matches often occur by coincidence, so steps verify their drafts only after many of them were
right.
"""
_PRIOR_WEIGHT, _CLASS_DECAY, _OWN_DECAY = 4.0, 0.98, 0.85
"""``_PRIOR_WEIGHT``: the weight of ``_FIRST_CHANCE``, as a number of drafts. The other two: each new draft multiplies
the weights of earlier drafts by this factor. ``_CLASS_DECAY`` is for all sequences, ``_OWN_DECAY`` for one sequence.
"""


class StepCosts:
    """Running means: of the time of a decode step for each number of entries, and of the host's time between two steps.

    Times are seconds.
    """

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, int]] = {}
        self._num_steps = 0
        self._estimates: dict[int, float | None] = {}
        """A cache of the results of ``seconds``, until the estimates are computed again."""
        self.gap_s = 0.0
        """Mean time from the end of a step to the start of the next step, if the next step is not sent ahead."""

    def note(self, entries: int, device_s: float, total_s: float) -> bool:
        """Records the times of a decode step with ``entries`` entries.

        ``device_s`` is the time in which the agents computed the step. ``total_s`` is the time from sending the step to
        its result, without the time in the agent's queue.

        Returns True if the estimates may have changed. To save time, they change only every few steps.
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
        """Returns the expected device time of a decode step, or None if no step of this or a smaller size was measured.
        """
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
    """The fraction of all requests' drafts that were right, for each value of ``Draft.matches``."""

    def __init__(self) -> None:
        self._counts = {match: (chance * _PRIOR_WEIGHT, _PRIOR_WEIGHT) for match, chance in _FIRST_CHANCE.items()}

    def note(self, match: int, is_right: bool) -> None:
        """Records whether a draft was right. All drafts before it must have been right."""
        right, tried = self._counts[match]
        self._counts[match] = (right * _CLASS_DECAY + is_right, tried * _CLASS_DECAY + 1)

    def of(self, match: int) -> float:
        """Returns the fraction of drafts with this value of ``Draft.matches`` that were right."""
        right, tried = self._counts[match]
        return right / tried


class OwnChance:
    """The fraction of right drafts of one request. Recent drafts have the largest weight."""

    def __init__(self) -> None:
        self._right = self._tried = 0.0

    def note(self, is_right: bool) -> None:
        self._right = self._right * _OWN_DECAY + is_right
        self._tried = self._tried * _OWN_DECAY + 1

    def mixed_with(self, chance: float) -> float:
        """Returns the probability that the request's next draft is right. ``chance`` is this probability for all
        requests.
        """
        return (self._right + _PRIOR_WEIGHT * chance) / (self._tried + _PRIOR_WEIGHT)
