"""Looks ahead in the constraint of a sequence: finds the allowed drafts, and the mask after each draft."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llm_serving.request import Constraint, ConstraintError, forked

Mask = npt.NDArray[np.uint32]


def is_allowed(mask: Mask, token_id: int) -> bool:
    """Returns True if a mask has this token. No mask has a token outside of the vocabulary."""
    return 0 <= token_id < 32 * mask.size and bool(mask[token_id // 32] >> token_id % 32 & 1)


def allowed_drafts(constraint: Constraint, draft: Sequence[int]) -> tuple[list[int], list[Mask]]:
    """Returns the drafts before the first forbidden draft, and masks of allowed tokens.

    The first mask is for the sequence's next token. Each further mask is for the token after one of the returned
    drafts. Returns no drafts and no masks if the constraint cannot look ahead. The constraint stays unchanged.
    """
    fork = forked(constraint)
    if fork is None:
        return [], []
    allowed: list[int] = []
    masks = [fork.mask()]
    if fork.has_failed:
        return [], []
    for token_id in draft:
        if not is_allowed(masks[-1], token_id):
            break
        try:
            fork.advance(token_id)
        except ConstraintError:
            break
        mask = fork.mask()
        if fork.has_failed:
            break
        allowed.append(token_id)
        masks.append(mask)
    return allowed, masks
