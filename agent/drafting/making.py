"""Makes the object that makes drafts for an agent, with a draft model or with a head of the model."""

from __future__ import annotations

from agent.drafting.drafter import Drafter
from agent.drafting.head_drafter import HeadDrafter
from agent.drafting.head_network import HeadNetwork
from agent.drafting.network import DraftNetwork
from agent.model_start import ModelStart
from llm_serving.config import Config
from llm_serving.config.draft_config import draft_config
from llm_serving.model.parallel import answers


def make_drafter(config: Config, rank: int, model_start: ModelStart) -> Drafter | None:
    """Makes the drafter of an agent, but does not load it. Returns None if the agent makes no drafts.

    ``model_start`` is the start of the agent's model. If agents share the model, only the agent that samples makes
    drafts, with the whole draft model.
    """
    if config.draft is None or not answers(rank, config.parallel_config):
        return None
    own = draft_config(config)
    if config.draft.head is None:
        return Drafter(config, DraftNetwork(own, model_start))
    return HeadDrafter(config, HeadNetwork(own, config.draft.head, model_start))
