"""``return_logits``: the best token ids of each step with their raw logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llm_serving.request import TokenLogits

__all__ = ["step_logits"]


def step_logits(entries: Sequence[TokenLogits]) -> list[dict[str, Any]]:
    """One object a step: the sampled token, and the best tokens with their logits, best first."""
    return [
        {
            "token_id": entry.token_id,
            "logit": entry.logprob + entry.logsumexp,
            "top_token_ids": [token_id for token_id, _ in entry.top],
            "top_logits": [logit for _, logit in entry.top],
        }
        for entry in entries
    ]
