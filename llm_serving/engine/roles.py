"""Makes ``PrefillSplit``, the rule that divides prefill and decode among the replicas, from a config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_serving.config import Config
from llm_serving.scheduler.limits import SchedulerLimits

if TYPE_CHECKING:
    from llm_serving.handover.transport import BlockPools
    from llm_serving.routing.prefill_split import PrefillSplit


def prefill_split(config: Config, limits: SchedulerLimits, pools: BlockPools | None = None) -> PrefillSplit | None:
    """Returns the rule for the roles of the replicas. None if every replica does both prefill and decode.

    ``pools`` has the hand-over pools of replicas on several machines. None: the replicas share a pool.
    """
    if not limits.hands_over:
        return None
    from llm_serving.handover.pool import HandOverPool
    from llm_serving.handover.threshold import PromptThreshold
    from llm_serving.routing.placement import Role
    from llm_serving.routing.prefill_split import PrefillSplit

    parallel = config.parallel_config
    pool = HandOverPool(config.num_hand_over_blocks, limits.cache_namespace)
    threshold = PromptThreshold(limits.block_size, parallel.prefill_threshold)
    has_draft_model = config.draft is not None and config.draft.head is None
    roles = [Role(role) for role in parallel.replica_roles]
    return PrefillSplit(roles, pool, threshold, limits.block_size, pools, sends_tokens=has_draft_model)
