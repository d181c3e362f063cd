"""Models how far single steps deviate from the fitted time, and for how long.

Equal steps take different times because of other activity on the machine: other processes, a hypervisor that takes away
cores, other users of the memory. Part of this noise lasts longer than a step: for some time every step is slow. The
model is therefore the sum of two kinds of noise. The first kind is a state of the machine, which changes slowly; its
influence decays exponentially. The second kind is independent for each step. The first kind does not make more steps
slow, but its slow steps follow each other. This matters for latency: independent noise averages out over the tokens of
a request, but requests queue up while the machine is slow for seconds.

The sum of both is a normal random variable, which is mapped to the measured quantiles (a Gaussian copula). The state is
an Ornstein-Uhlenbeck process (Uhlenbeck and Ornstein, "On the Theory of the Brownian Motion", 1930).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

__all__ = ["Spread", "SpreadDraws", "lasting_part"]

NEAREST_S, FARTHEST_S, CLASSES = 0.01, 2.56, 8
"""Pairs of steps are grouped by their distance: the seconds between their starts, from NEAREST_S to FARTHEST_S.

There are CLASSES groups. Each covers a range of distances that is twice as wide as the previous range. Pairs outside
all ranges are not used. Steps that begin less than NEAREST_S apart are always consecutive steps. Beyond FARTHEST_S, the
times of the two steps no longer depend on each other.
"""
MIN_PAIRS = 100
"""Minimum number of pairs of steps in a group of distances. Groups with fewer pairs are ignored."""
DECAY_TIMES_S = np.geomspace(0.01, 2.0, 107)
"""Values that the fit tries for the time in which the machine's state decays. Neighbouring values differ by 5 %."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Deviations of single steps. ``quantiles`` are evenly spaced quantiles of measured time / predicted time."""

    quantiles: Sequence[float]
    lasting_share: float = 0.0
    """Fraction of the noise's variance that belongs to the state of the machine, 0 to 1."""
    lasting_s: float = 0.0
    """Time after which the state's correlation with itself has decayed to 1/e."""

    def draws(self, generator: random.Random) -> SpreadDraws:
        """Returns an object that draws random ratios for the steps of one machine."""
        return SpreadDraws(self, generator)


class SpreadDraws:
    """Draws random ratios (measured time / predicted time) for consecutive steps of one machine."""

    def __init__(self, spread: Spread, generator: random.Random) -> None:
        self._spread = spread
        self._random = generator
        self._state = generator.gauss(0.0, 1.0)
        self._moment = -math.inf

    def draw(self, moment: float) -> float:
        """Returns the ratio (measured time / predicted time) of a step that begins at the time ``moment``.

        ``moment`` is the time in seconds at which the step would begin if all earlier ratios were 1. If it is before
        the ``moment`` of the previous call, the state of the machine stays the same.
        """
        spread, gauss = self._spread, self._random.gauss
        if spread.lasting_share and moment > self._moment:
            kept = math.exp(-(moment - self._moment) / spread.lasting_s)
            self._state = kept * self._state + math.sqrt(1.0 - kept * kept) * gauss(0.0, 1.0)
            self._moment = moment
        share = spread.lasting_share
        noise = math.sqrt(share) * self._state + math.sqrt(1.0 - share) * gauss(0.0, 1.0)
        place = 0.5 * math.erfc(-noise / math.sqrt(2.0))
        count = len(spread.quantiles)
        return spread.quantiles[min(count - 1, int(place * count))]


def lasting_part(ratios: Sequence[float], begins: Sequence[float]) -> tuple[float, float]:
    """Returns which fraction of the noise lasts longer than a step, and the time in seconds in which it decays to 1/e.

    These are ``lasting_share`` and ``lasting_s`` of ``Spread``. Both are 0 if slow periods do not last, or if there are
    too few steps. ``ratios`` are measured times divided by predicted times, in the order in which the steps ran.
    ``begins`` are the start times of these steps in seconds.

    The ratios are replaced by normal scores, which depend only on their order, so that single extreme ratios have
    little influence. The product of two steps' scores is large on average if both are slow, or both are fast. Pairs of
    steps are grouped by their distance in time. ``share * exp(-distance / seconds)`` is fitted to the mean product of
    each group, by least squares.
    """
    order = np.argsort(np.argsort(np.asarray(ratios), kind="stable"), kind="stable")
    normal = NormalDist()
    scores = np.array([normal.inv_cdf((place + 0.5) / len(order)) for place in order.tolist()])
    moments = np.asarray(begins, float)
    edges = np.geomspace(NEAREST_S, FARTHEST_S, CLASSES + 1)
    products, distances, counts = np.zeros(CLASSES), np.zeros(CLASSES), np.zeros(CLASSES)
    for lag in range(1, len(scores)):
        between = moments[lag:] - moments[:-lag]
        comparable = (between > 0.0) & (between < edges[-1])
        if not comparable.any():
            break
        near = comparable & (between >= edges[0])
        place = np.searchsorted(edges, between[near], side="right") - 1
        products += np.bincount(place, (scores[lag:] * scores[:-lag])[near], CLASSES)
        distances += np.bincount(place, between[near], CLASSES)
        counts += np.bincount(place, minlength=CLASSES)
    enough = counts >= MIN_PAIRS
    if enough.sum() < 2:
        return 0.0, 0.0
    found, distance = products[enough] / counts[enough], distances[enough] / counts[enough]
    shapes = np.exp(-distance[None, :] / DECAY_TIMES_S[:, None])
    shares = np.clip((shapes @ found) / (shapes * shapes).sum(1), 0.0, 1.0)
    best = int(np.argmin(((shares[:, None] * shapes - found) ** 2).sum(1)))
    return (float(shares[best]), float(DECAY_TIMES_S[best])) if shares[best] > 0.0 else (0.0, 0.0)
