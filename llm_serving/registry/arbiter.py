"""Decides which models share the memory. The arbiter only computes with planned bytes; other modules start and end
processes.

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
    """The memory that one model occupies.

    ``may_sleep`` is True if the model is idle and not pinned, so that another model may get its memory. ``last_used``
    is the time of the last use in seconds.
    """

    name: str
    need: Need
    last_used: float
    may_sleep: bool


class Arbiter:
    """Decides which models must leave memory. ``limits`` has the bytes of each pool. A pool without a limit is never
    full.
    """

    def __init__(self, limits: Need) -> None:
        self.limits = dict(limits)

    def make_room(self, name: str, need: Need, claims: Sequence[Claim]) -> list[Claim]:
        """Returns the claims that must end before the model ``name`` can be started, usually none.

        Chooses the least recently used claims, and no more than necessary. Raises ModelMemoryError if the memory of all
        claims that may sleep is not enough. The error text states the needed bytes and the limit.
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
        # Remove unnecessary claims from the choice: a large claim that was chosen last may free enough memory alone.
        for claim in reversed(list(chosen)):
            fewer = [each for each in chosen if each is not claim]
            if not self._short(need, claims, fewer):
                chosen = fewer
        return chosen

    def _short(self, need: Need, claims: Sequence[Claim], ended: Sequence[Claim]) -> list[str]:
        """Returns the pools whose limit ``need`` would exceed after the end of the claims ``ended``."""
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
