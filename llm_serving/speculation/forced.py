"""Makes drafts for sequences that score a prompt (``echo`` and ``prompt_logprobs``). Their tokens are known in advance.

A decode step verifies all drafts of a sequence, so it scores up to ``TILE`` tokens of a prompt. The result for each
token is bit-identical to that of a step with one token. So the log-probabilities equal those of decoding. The agents
need no more memory for logits than in decoding, even for long prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llm_serving.constraints.forced import ForcedTokens
from llm_serving.request import Request
from llm_serving.scheduler.output import RequestUpdate
from llm_serving.speculation.look_ahead import Mask, allowed_drafts

TILE = 64
"""Maximum number of tokens of a sequence that one step scores."""


def forced_offers(
    updates: Iterable[RequestUpdate], prepare_masks: Callable[[Request, list[Mask]], None]
) -> list[tuple[str, list[int]]]:
    """Returns (request id, drafts) for each sequence with forced tokens that has just got a token.

    ``prepare_masks`` gets the sequence's request and the mask of allowed tokens after each draft. Before this call, the
    constraints must have advanced by the new tokens.
    """
    offers = []
    for update in updates:
        request, constraint = update.request, update.request.constraint
        if not isinstance(constraint, ForcedTokens) or update.num_later or request.is_finished:
            continue
        draft, masks = allowed_drafts(constraint, constraint.forced_tokens()[: TILE - 1])
        if draft:
            prepare_masks(request, masks[1:])
            offers.append((request.request_id, draft))
    return offers
