"""Decides which models share the memory. It only computes with planned bytes, and knows no processes or clocks.

Memory is divided into pools: ``host``, and one pool for each device, such as ``device 0``. A model needs bytes of one
or more pools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llm_serving.errors import ModelMemoryError
from llm_serving.planning.rank_memory import format_bytes

Need = Mapping[str, int]
"""Planned bytes of a model in each pool, by the pool's name."""
HOST = "host"
NODES = "nodes"


@dataclass(frozen=True, slots=True)
class Claim:
    """Memory that a model in memory has. ``may_sleep``: the model is idle and not pinned, so it may lose the memory.

    ``last_used`` orders the claims: the smaller number was used longer ago.
    """

    name: str
    need: Need
    last_used: float
    may_sleep: bool


class Arbiter:
    """Allots the memory of the pools. ``limits`` has the bytes of each pool. A pool without a limit is never full."""

    def __init__(self, limits: Need) -> None:
        self.limits = dict(limits)

    def make_room(self, name: str, need: Need, claims: Sequence[Claim]) -> list[Claim]:
        """Return the claims that must end before the model ``name`` can be started. Usually there are none.

        The claims that were not used for the longest time are chosen, and no more than necessary. Raises
        ModelMemoryError with the numbers if even all claims that may sleep are not enough.
        """
        chosen: list[Claim] = []
        for claim in sorted((each for each in claims if each.may_sleep), key=lambda each: each.last_used):
            short = self._short(need, claims, chosen)
            if not short:
                break
            if any(claim.need.get(pool, 0) for pool in short):
                chosen.append(claim)
        if self._short(need, claims, chosen):
            raise ModelMemoryError(self._explain(name, need, claims))
        # A claim that was chosen early may be unnecessary, because a later and larger one frees enough.
        for claim in reversed(list(chosen)):
            fewer = [each for each in chosen if each is not claim]
            if not self._short(need, claims, fewer):
                chosen = fewer
        return chosen

    def _short(self, need: Need, claims: Sequence[Claim], ended: Sequence[Claim]) -> list[str]:
        """Return the pools whose limit would be exceeded if the claims ``ended`` had ended."""
        kept = [claim for claim in claims if not any(claim is each for each in ended)]
        used = {pool: sum(claim.need.get(pool, 0) for claim in kept) for pool in need}
        return [pool for pool, size in need.items() if pool in self.limits and used[pool] + size > self.limits[pool]]

    def _explain(self, name: str, need: Need, claims: Sequence[Claim]) -> str:
        staying = [claim for claim in claims if not claim.may_sleep]
        pool = self._short(need, staying, ())[0]
        holders = [claim for claim in staying if claim.need.get(pool, 0)]
        others = ", ".join(f"{claim.name} {format_bytes(claim.need[pool])}" for claim in holders)
        taken = f"; models that cannot make room have: {others}" if others else ""
        return (
            f"the model {name!r} needs {format_bytes(need[pool])} of {pool} memory, and all models together may have "
            f"{format_bytes(self.limits[pool])} (models_config.memory_limit){taken}"
        )
