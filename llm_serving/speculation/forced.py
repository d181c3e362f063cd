"""Drafts of sequences whose tokens are known before: those that score a prompt (``echo`` and ``prompt_logprobs``).

A decode step then scores up to ``TILE`` tokens of a prompt, because it has an entry for each draft. Each entry has the
bits of a step with one token, so the log-probabilities are those of decoding. The agents need memory for the logits of
the largest batch, however long the prompt is.
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
    """Returns the drafts of the sequences with forced tokens that got a token, by request id.

    ``prepare_masks`` takes the masks of the tokens after each draft. The constraints must have taken the new tokens.
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
