"""Runs random scripts on replicas with separate prefill and decode, and damages the hand-over pool meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from llm_serving.handover.pool import HandOverPool
from llm_serving.handover.threshold import PromptThreshold
from llm_serving.routing.placement import Role
from llm_serving.routing.prefill_split import PrefillSplit
from llm_serving.scheduler.scheduler import Scheduler
from support.routed_simulation import RoutedPlayer, RoutedSimulation
from support.scheduler_scripts import Operation, Script, make_script_limits
from support.tcp_pools import TcpPools

__all__ = ["ROLES", "HandOverPlayer", "play_hand_overs"]

PREFILL, DECODE, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH
ROLES = ([PREFILL, DECODE], [PREFILL, BOTH], [PREFILL, DECODE, DECODE], [PREFILL, PREFILL, DECODE], [DECODE, BOTH],
         [PREFILL, DECODE, BOTH])  # fmt: skip


class HandOverPlayer(RoutedPlayer):
    """Runs a script on replicas with ``roles``. ``faults`` is the chance of a damaged block at each operation.
    With a quarter of this chance, the blocks of a replica are distrusted.

    With ``tcp``, each replica has a pool of its own, blocks go through TCP connections, and ``faults`` is also the
    chance of a disturbed transfer. With ``one_sided``, too, the receivers read the contents outside the connections.
    ``tier_hosts``: host blocks of the KV tiers of each replica, 0 for no KV tiers.
    """

    def __init__(
        self,
        limits: dict[str, Any],
        roles: Sequence[Role],
        seed: int,
        *,
        faults: float = 0.0,
        tcp: bool = False,
        one_sided: bool = False,
        record: Callable[[Scheduler, int], Scheduler] | None = None,
        tier_hosts: int = 0,
    ) -> None:
        tiers = {"has_tiers": True, "prefix_cache": True} if tier_hosts else {}
        made = make_script_limits({**limits, **tiers, "page_attention": True, "hands_over": True})
        self._faults, self._rng = faults, random.Random(seed)
        self._doubts = random.Random(seed)
        longest = -(-made.max_model_len // made.block_size)
        pool = HandOverPool(longest * self._rng.choice([1, 1, 2, 4]), made.cache_namespace)
        fixed = self._rng.choice([1, 4, 10, None])
        sizes = (len(roles), pool.num_blocks, made.block_size)
        pools = TcpPools(*sizes, seed, faults=faults, one_sided=one_sided) if tcp else None
        split = PrefillSplit(roles, pool, PromptThreshold(made.block_size, fixed), made.block_size, pools)
        self.routed = RoutedSimulation(made, len(roles), seed, record=record, split=split, tier_hosts=tier_hosts)
        self.simulation = self.routed

    def do(self, operation: Operation) -> None:
        if self._rng.random() < self._faults:
            memory = self._rng.choice(self.routed.memories)
            self._rng.choice([memory.flip, memory.overwrite])(self._rng.randrange(memory.num_blocks))
        if self._doubts.random() < self._faults / 4:
            index = self._doubts.randrange(len(self.routed.replicas))
            self.routed.distrust(index, recompute=self._doubts.random() < 0.5)
        super().do(operation)


def play_hand_overs(
    script: Script,
    roles: Sequence[Role],
    seed: int,
    *,
    faults: float = 0.0,
    tcp: bool = False,
    one_sided: bool = False,
    record: Callable[[Scheduler, int], Scheduler] | None = None,
    tier_hosts: int = 0,
) -> RoutedSimulation:
    """Runs a script until all its requests have ended. Raises AssertionError if a check fails.

    See ``HandOverPlayer`` for the arguments.
    """
    ways = {"tcp": tcp, "one_sided": one_sided}
    player = HandOverPlayer(script.limits, roles, seed, faults=faults, record=record, tier_hosts=tier_hosts, **ways)
    try:
        for operation in script.operations:
            player.do(operation)
        player.finish()
    finally:
        if player.routed.pools is not None:
            player.routed.pools.close()
    return player.routed
