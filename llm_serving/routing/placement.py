"""Chooses the replica for the first request of the router's queue, by the rule of ``parallel_config.routing``.

``prefix``
    Chooses the replica whose prefix cache has the most tokens of the prompt, including tokens that steps in flight
    compute. The load of a replica is the number of tokens that it must still compute. A load is out of balance if it is
    more than ``BALANCE_FACTOR`` times the least load and exceeds the least load by more than a bound. Cached tokens of
    a replica whose load is out of balance are ignored. If no cached tokens remain, the rule chooses the least loaded
    replica. The rule is the cache-aware routing of SGLang (Zheng et al., NeurIPS 2024) with two differences: SGLang
    estimates cached tokens from the requests that it sent, and counts load in requests. Preble (Srivatsa et al. 2024)
    and DLPM (Cao et al. 2025) are related methods.

``least_loaded``
    Chooses the replica with the fewest tokens that must still be computed.

``round_robin``
    Chooses the replicas one after the other. This rule is a baseline for measurements.

Each rule chooses among the replicas that have a batch row and blocks for the request. To add a rule, add a member to
``Routing`` and a case to ``choose``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

BALANCE_FACTOR = 1.5
"""A load of at most this factor times the least load is in balance."""


class Routing(enum.Enum):
    """The values of the setting ``parallel_config.routing``."""

    PREFIX = "prefix"
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"


class Role(enum.Enum):
    """The task of a replica, by ``parallel_config.roles``."""

    PREFILL = "prefill"
    """A replica that computes long prompts, and hands their blocks over to decode replicas."""
    DECODE = "decode"
    """A replica that computes short prompts, takes over the blocks of long prompts, and decodes."""
    BOTH = "both"
    """A replica that computes prompts of any length, takes over handed blocks, and decodes."""


class Placed(enum.Enum):
    """The reason why the router chose a replica, for logs and metrics."""

    PREFIX = "prefix"
    """The replica has more tokens of the prompt in its cache than at least one other replica."""
    LOAD = "load"
    """The replica has the least load. Cached tokens did not decide the choice. No replica has cached tokens of the
    prompt, or the replica that has them is overloaded or cannot start the request.
    """
    TURN = "turn"
    """The replica was next in round-robin order."""
    PROMPT = "prompt"
    """The replica is a prefill replica, and the prompt is long."""
    HANDED = "handed"
    """Another replica has computed the prompt."""
    GROUP = "group"
    """The replica already has another sample of the same prompt, or another beam of the same search."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as a candidate for the first request of the router's queue: its load, cached tokens and capacity."""

    index: int
    load: int
    """Number of tokens that the replica must still compute if each of its requests reaches its maximum output."""
    cached_tokens: int
    """Tokens of the request that are in the replica's prefix cache, or that steps in flight compute there."""
    fits: bool
    """True if the replica has a batch row and blocks for the request. The batch rows and blocks for requests that
    already wait at the replica do not count.
    """
    is_open: bool
    """True if the replica can start the request in its next step."""


def choose(
    candidates: Sequence[Candidate], routing: Routing, balance_tokens: int, next_index: int = 0
) -> tuple[int, Placed] | None:
    """Returns the index of the chosen replica and the reason, or None if no replica can start the request now.

    Loads that exceed the least load by at most ``balance_tokens`` are in balance. ``next_index`` is the index of the
    next replica in round-robin order.
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
    """Returns True if ``load`` is in balance with ``least``, the load of the least loaded replica. Loads are tokens."""
    return load <= max(least + balance_tokens, BALANCE_FACTOR * least)
