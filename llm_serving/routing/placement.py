"""The choice of a replica for the first waiting request (``parallel_config.routing``).

``prefix``
    The replica whose prefix cache has or computes the largest part of the prompt, if its load is in balance with the
    least loaded replica. Else the least loaded replica. A load is out of balance if it is more than ``BALANCE_FACTOR``
    times the least load and also exceeds it by more than a bound. This is the cache-aware routing of SGLang (Zheng et
    al., NeurIPS 2024; ``balance_abs_threshold`` and ``balance_rel_threshold`` of its router), with two differences.
    Cached tokens are read from the caches, not estimated from sent requests. Load is counted in tokens that must still
    be computed, not in requests. So a popular prefix spreads over as many replicas as its load needs. (Preble,
    Srivatsa et al. 2024, weighs computing a prefix again against waiting for it. DLPM, Cao et al. 2025, combines
    fairness and locality; here the order of the queue gives fairness.)

``least_loaded``
    The replica with the fewest tokens that must still be computed.

``round_robin``
    The replicas one after the other, for comparison.

Each rule chooses among the replicas that can start the request. A replica with a cached prefix may have a longer queue
than others, but it must have the batch rows and the blocks. To add a rule, add a member to ``Routing`` and a case to
``choose``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BALANCE_FACTOR", "Candidate", "Placed", "Routing", "choose"]

BALANCE_FACTOR = 1.5
"""Loads up to this factor above the least load are in balance."""


class Routing(enum.Enum):
    """``parallel_config.routing``."""

    PREFIX = "prefix"
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"


class Placed(enum.Enum):
    """Why a request went to its replica."""

    PREFIX = "prefix"
    """The replica has the largest cached part of the prompt."""
    LOAD = "load"
    """The replica has the least load, among those with the largest cached part of the prompt."""
    TURN = "turn"
    """The replica was next in round-robin order."""
    GROUP = "group"
    """Other requests of the same group are on the replica."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica, for a request that needs a replica."""

    index: int
    load: int
    """Tokens that must be computed for the requests there, if each gets its maximum output."""
    cached_tokens: int
    """Tokens of the request that are cached there, or that steps in flight compute."""
    fits: bool
    """The replica has a batch row and blocks for the request, behind all requests that go first there."""
    is_open: bool
    """The request also fits the next step there."""


def choose(
    candidates: Sequence[Candidate], routing: Routing, balance_tokens: int, next_index: int = 0
) -> tuple[int, Placed] | None:
    """Returns the replica for a request and the reason. Returns None if no replica can start the request now.

    ``balance_tokens`` is the difference of loads that is always in balance. ``next_index`` is the next replica in
    round-robin order.
    """
    able = [one for one in candidates if one.is_open or (one.fits and one.cached_tokens > 0)]
    if not able:
        return None
    if routing is Routing.ROUND_ROBIN:
        opened = [one for one in able if one.is_open]
        best = min(opened, key=lambda one: (one.index < next_index, one.index), default=None)
        return None if best is None else (best.index, Placed.TURN)
    if routing is Routing.PREFIX:
        least = min(one.load for one in candidates)
        balanced = [one for one in able if is_balanced(one.load, least, balance_tokens)]
        best = min(balanced, key=lambda one: (-one.cached_tokens, not one.is_open, one.load, one.index), default=None)
        if best is not None and best.cached_tokens:
            is_better = any(one.cached_tokens < best.cached_tokens for one in candidates)
            return best.index, Placed.PREFIX if is_better else Placed.LOAD
    best = min((one for one in able if one.is_open), key=lambda one: (one.load, one.index), default=None)
    return None if best is None else (best.index, Placed.LOAD)


def is_balanced(load: int, least: int, balance_tokens: int) -> bool:
    """Returns True if a load is in balance with the least load."""
    return load <= max(least + balance_tokens, BALANCE_FACTOR * least)
