"""Creates the block supply that the limits of a scheduler need."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from llm_serving.block_supply.base import BlockSupply
from llm_serving.block_supply.contiguous_supply import ContiguousSupply
from llm_serving.block_supply.prefix_supply import PrefixSupply
from llm_serving.block_supply.tier_supply import TierSupply
from llm_serving.kvcache.kv_cache_manager import KVCacheManager
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.state import InFlightSteps

if TYPE_CHECKING:
    from llm_serving.block_supply.state_supply import StateSupply


def make_block_supply(limits: SchedulerLimits, kv_cache: KVCacheManager) -> BlockSupply:
    """Creates the block supply for the limits ``page_attention``, ``prefix_cache``, ``has_tiers`` and
    ``num_state_snapshots``.
    """
    if not limits.page_attention:
        return ContiguousSupply(kv_cache)
    if limits.num_state_snapshots:
        from llm_serving.block_supply.state_supply import StateSupply  # needed only for models with linear attention

        return StateSupply(kv_cache, limits.num_state_snapshots)
    if limits.has_tiers:
        return TierSupply(kv_cache)
    return PrefixSupply(kv_cache) if limits.prefix_cache else BlockSupply(kv_cache)


def plan_states(supply: BlockSupply, in_flight: InFlightSteps) -> StateSupply:
    """Lets ``supply`` decide which states of linear attention each new step reads and saves.

    Returns ``supply``, which must be a ``StateSupply``.
    """
    states = cast("StateSupply", supply)
    in_flight.note_added = states.plan
    return states
