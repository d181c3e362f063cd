"""Makes the object that makes drafts for an agent, with a draft model or with a head of the model."""

from __future__ import annotations

from agent.drafting.drafter import Drafter
from agent.drafting.head_drafter import HeadDrafter
from agent.drafting.head_network import HeadNetwork
from agent.drafting.network import DraftNetwork
from llm_serving.config import Config


def make_drafter(config: Config, rank: int) -> Drafter | None:
    """Makes the drafter of a deployment, but does not load it. Returns None if no agent makes drafts."""
    if config.draft is None:
        return None
    own = config.draft_config()
    if config.draft.head is None:
        return Drafter(config, DraftNetwork(own, rank))
    return HeadDrafter(config, HeadNetwork(own, config.draft.head, rank))
