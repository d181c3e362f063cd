"""Chooses the block supply for the settings. Also has the supply for ``model_config.page_attention: false``."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from llm_serving.kvcache.kv_cache_manager import KVCacheManager
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.prefix_supply import PrefixSupply
from llm_serving.scheduler.running import BlockSupply
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.state import InFlightSteps

if TYPE_CHECKING:
    from llm_serving.scheduler.state_supply import StateSupply


class _ContiguousSupply(BlockSupply):
    """Gives a sequence one range of consecutive blocks for its prompt and its longest output.

    So no sequence is preempted because blocks are missing, but many blocks of a sequence stay empty.
    """

    def fits(self, sequence: Sequence, reserve: int) -> bool:
        table: list[int] = []
        found = self._kv_cache.reserve(table, sequence.max_cached_tokens)
        self._kv_cache.free(table)
        return found

    def start(self, sequence: Sequence) -> None:
        if not self._kv_cache.reserve(sequence.block_table, sequence.max_cached_tokens):
            raise AssertionError(f"no range of blocks to start {sequence.request.request_id}")


def make_block_supply(limits: SchedulerLimits, kv_cache: KVCacheManager) -> BlockSupply:
    """Creates the block supply for the limits ``page_attention``, ``prefix_cache`` and
    ``num_state_snapshots``.
    """
    if not limits.page_attention:
        return _ContiguousSupply(kv_cache)
    if limits.num_state_snapshots:
        from llm_serving.scheduler.state_supply import StateSupply  # needed only for models with linear attention

        return StateSupply(kv_cache, limits.num_state_snapshots)
    return PrefixSupply(kv_cache) if limits.prefix_cache else BlockSupply(kv_cache)


def plan_states(supply: BlockSupply, in_flight: InFlightSteps) -> StateSupply:
    """Makes the block supply of a model with linear attention plan the states of each new step. Returns the supply."""
    states = cast("StateSupply", supply)
    in_flight.note_added = states.plan
    return states
