"""How far single steps lie from a model of their times, and for how long.

A step takes more or less time than such steps do because of what else goes on in the machine: other processes, a
hypervisor that gives the cores to somebody else, memory that others read. Part of that lasts: while it does every step
is slow. Of the steps' noise a share therefore belongs to a state of the machine that is forgotten exponentially, the
rest to each step alone. That does not change how often a step is so slow, but slow steps come together: noise of
single steps is averaged away over the tokens of an answer, seconds that are slow are not, and requests pile up in them.

The noise is a normal one, made to have the quantiles that were measured (a Gaussian copula); the state is the Ornstein
and Uhlenbeck process (Uhlenbeck and Ornstein, "On the Theory of the Brownian Motion", 1930).
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
"""Distances between steps at which they are compared, in classes that double: from steps that follow each other to
what is forgotten, or is the machine's speed in a whole run."""
LEAST_PAIRS = 100
"""Of steps at such a distance, below which it says nothing."""
LASTINGS_S = np.geomspace(0.01, 2.0, 107)
"""Lastings that are tried, 5 % apart."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How far single steps lie from the model: quantiles of measured over predicted time, evenly spaced."""

    quantiles: Sequence[float]
    lasting_share: float = 0.0
    """Share of the noise's variance that is a state of the machine, 0 to 1."""
    lasting_s: float = 0.0
    """Seconds after which that state is correlated with itself by 1/e."""

    def draws(self, generator: random.Random) -> SpreadDraws:
        """One machine's steps."""
        return SpreadDraws(self, generator)


class SpreadDraws:
    """Measured over predicted time, step after step."""

    def __init__(self, spread: Spread, generator: random.Random) -> None:
        self._spread = spread
        self._random = generator
        self._state = generator.gauss(0.0, 1.0)
        self._moment = -math.inf

    def draw(self, moment: float) -> float:
        """Of a step that begins at ``moment``, in seconds without what noise took; one before the last draw's counts as
        that."""
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
    """Share and seconds of the part that lasts (``Spread``), of steps in the order in which they ran: measured over
    predicted time, and when each began, in seconds. Zeros when nothing lasts, or too few steps are near each other.

    ``share * exp(-distance / seconds)``, least squares over the classes of distances, is fitted to the mean products of
    the steps' normal scores: what counts is the order of the ratios, so single extreme ones do not."""
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
    told = counts >= LEAST_PAIRS
    if told.sum() < 2:
        return 0.0, 0.0
    found, distance = products[told] / counts[told], distances[told] / counts[told]
    shapes = np.exp(-distance[None, :] / LASTINGS_S[:, None])
    shares = np.clip((shapes @ found) / (shapes * shapes).sum(1), 0.0, 1.0)
    best = int(np.argmin(((shares[:, None] * shapes - found) ** 2).sum(1)))
    return (float(shares[best]), float(LASTINGS_S[best])) if shares[best] > 0.0 else (0.0, 0.0)
