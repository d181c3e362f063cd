"""Computes the gain of decode steps with drafts over plain steps."""

from __future__ import annotations

from llm_serving.speculation.costs import StepCosts


class Gains:
    """The gain of decode steps with drafts, for a fixed number of sequences.

    The gain is the tokens per second of a step with drafts, divided by the tokens per second of a plain step. A plain
    step has no drafts. An instance keeps the estimates of the time at which it was created.
    """

    def __init__(self, costs: StepCosts, num_sequences: int, max_drafts: int) -> None:
        """``max_drafts`` is the maximum number of drafts of a step. It becomes 0 if no plain step was measured."""
        plain_s = costs.seconds(num_sequences)
        times = [plain_s or 0.0]
        for size in range(1, max_drafts + 1) if plain_s else ():
            seconds = costs.seconds(num_sequences + size)
            if seconds is None:
                break
            times.append(seconds + costs.gap_s)
        self._times = [num_sequences * seconds / plain_s for seconds in times] if plain_s else [float(num_sequences)]
        """For each number of drafts: the number of tokens that a step with these drafts must give for a gain of 1."""
        self._slopes = _least_slopes(self._times)
        self.max_drafts = len(times) - 1
        self.largest = max(self.of(size, num_sequences + size) for size in range(len(times)))
        """The gain if all drafts are right."""

    def of(self, size: int, tokens: float) -> float:
        """Returns the gain of a step with ``size`` drafts that gives this expected number of tokens."""
        return tokens / self._times[size]

    def may_rise(self, size: int, chance: float, gain: float) -> bool:
        """Returns False if no step with more than ``size`` drafts can have a gain above ``gain``.

        ``gain`` must be at least the gain with ``size`` drafts. ``chance`` is the largest probability that a further
        draft is right. A further draft makes the step longer. In this additional time, plain steps would give some
        number of tokens. To raise the gain, the draft must add more than ``gain`` times this number.
        """
        return size < self.max_drafts and chance > gain * self._slopes[size]


def _least_slopes(values: list[float]) -> list[float]:
    """Returns for each value, except the last one, the least slope of a line from this value to a later one.

    These are the slopes of the lower convex hull, which the monotone chain algorithm (Andrew, 1979) finds.
    """
    slopes: list[float] = []
    hull: list[tuple[int, float]] = []
    for place in range(len(values) - 1, -1, -1):
        while len(hull) > 1 and _slope(values, place, hull[-1][0]) >= hull[-1][1]:
            hull.pop()
        slope = _slope(values, place, hull[-1][0]) if hull else 0.0
        hull.append((place, slope))
        slopes.append(slope)
    return slopes[:0:-1]


def _slope(values: list[float], first: int, last: int) -> float:
    return (values[last] - values[first]) / (last - first)
