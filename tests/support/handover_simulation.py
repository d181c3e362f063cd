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

__all__ = ["ROLES", "HandOverPlayer", "play_hand_overs"]

PREFILL, DECODE, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH
ROLES = ([PREFILL, DECODE], [PREFILL, BOTH], [PREFILL, DECODE, DECODE], [PREFILL, PREFILL, DECODE], [DECODE, BOTH],
         [PREFILL, DECODE, BOTH])  # fmt: skip


class HandOverPlayer(RoutedPlayer):
    """Runs a script on replicas with ``roles``. ``faults`` is the chance of a damaged block at each operation."""

    def __init__(
        self,
        limits: dict[str, Any],
        roles: Sequence[Role],
        seed: int,
        *,
        faults: float = 0.0,
        record: Callable[[Scheduler, int], Scheduler] | None = None,
    ) -> None:
        made = make_script_limits({**limits, "page_attention": True, "hands_over": True})
        self._faults, self._rng = faults, random.Random(seed)
        longest = -(-made.max_model_len // made.block_size)
        pool = HandOverPool(longest * self._rng.choice([1, 1, 2, 4]), made.cache_namespace)
        fixed = self._rng.choice([1, 4, 10, None])
        split = PrefillSplit(roles, pool, PromptThreshold(made.block_size, fixed), made.block_size)
        self.routed = RoutedSimulation(made, len(roles), seed, record=record, split=split)
        self.simulation = self.routed

    def do(self, operation: Operation) -> None:
        assert self.routed.handed is not None
        if self._rng.random() < self._faults:
            damage = self._rng.choice([self.routed.handed.flip, self.routed.handed.overwrite])
            damage(self._rng.randrange(self.routed.handed.num_blocks))
        super().do(operation)


def play_hand_overs(
    script: Script,
    roles: Sequence[Role],
    seed: int,
    *,
    faults: float = 0.0,
    record: Callable[[Scheduler, int], Scheduler] | None = None,
) -> RoutedSimulation:
    """Runs a script until all its requests have ended. Raises AssertionError if a check fails."""
    player = HandOverPlayer(script.limits, roles, seed, faults=faults, record=record)
    for operation in script.operations:
        player.do(operation)
    player.finish()
    return player.routed
