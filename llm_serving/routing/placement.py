"""The choice of a replica for the request that is first in line.

``prefix``
    The replica whose prefix cache holds the most of the prompt (or is computing it), as long as its load is balanced
    with the least loaded one's; else the least loaded. Loads are out of balance when one is more than
    ``BALANCE_FACTOR`` times the other and more than a bound above it. This is the cache-aware routing of SGLang's
    router (Zheng et al., "SGLang", NeurIPS 2024, and its router's ``balance_abs_threshold``,
    ``balance_rel_threshold``), with two differences: what is cached is read off the caches themselves, not estimated
    from what was sent, and load is counted in tokens to be computed, not in requests. A popular prefix so spreads
    over as many replicas as its load needs (the trade of computing it again against waiting for it: Preble,
    Srivatsa et al. 2024; fairness between clients beside locality: DLPM, Cao et al. 2025, here the queue's order).

``least_loaded``
    The replica with the fewest tokens to be computed.

``round_robin``
    One after the other, whatever they hold. For comparison.

Whatever the rule, a request goes to a replica that can start it, where there is one: a preferred replica may have a
longer queue, but not one that rows or blocks cannot take.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BALANCE_FACTOR", "Candidate", "Placed", "Routing", "choose"]

BALANCE_FACTOR = 1.5
"""Loads within this factor of the least are balanced."""


class Routing(enum.Enum):
    """``parallel_config.routing``."""

    PREFIX = "prefix"
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"


class Placed(enum.Enum):
    """Why a request went to its replica."""

    PREFIX = "prefix"
    """It holds the most of the prompt."""
    LOAD = "load"
    """It had the least to compute, among those with as much of the prompt as any that could take it."""
    TURN = "turn"
    """It was its turn."""
    GROUP = "group"
    """Others of the request's group are there."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of one replica when a request is to be placed."""

    index: int
    load: int
    """Tokens to be computed for the requests there, if each gets all the output it may."""
    cached_tokens: int
    """Of the request's tokens, those whose keys and values are there, or will be when the steps in flight have run."""
    holds: bool
    """It has a row and blocks for the request, beside all that go before it there."""
    is_open: bool
    """And those that wait there do not fill a step: it starts with the next."""


def choose(
    candidates: Sequence[Candidate], routing: Routing, balance_tokens: int, turn: int = 0
) -> tuple[int, Placed] | None:
    """The replica for a request, and why; None when none can start it now.

    ``balance_tokens``: loads may differ by so much. ``turn``: index of the replica whose turn it is.
    """
    able = [one for one in candidates if one.is_open or (one.holds and one.cached_tokens > 0)]
    if not able:
        return None
    if routing is Routing.ROUND_ROBIN:
        opened = [one for one in able if one.is_open]
        best = min(opened, key=lambda one: (one.index < turn, one.index), default=None)
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
    """Whether a replica's load is not too far above the least."""
    return load <= max(least + balance_tokens, BALANCE_FACTOR * least)
