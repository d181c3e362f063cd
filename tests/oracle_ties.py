"""Greedy tokens of a running server held against an oracle's, where rounding may turn a tie round."""

from __future__ import annotations

from typing import Any

from server_process import ServerProcess

NUM_TOKENS = 64

# How far apart two of the oracle's logits may be for rounding to reverse them. A logit between 8 and 16, as the best
# ones of the golden models are, is itself rounded to a multiple of 0.0078 in float16 and of 0.0625 in bfloat16.
TIE_MARGIN = {"float16": 0.02, "bfloat16": 0.35}
MOST_TIES = {"float16": 0.01, "bfloat16": 0.05}
"""Of all positions."""


def complete(server: ServerProcess, prompt: list[int], count: int, **sampling: Any) -> list[int]:
    """The tokens of an answer; greedy unless ``sampling`` says otherwise."""
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = server.post("/v1/completions", {**body, **sampling})
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def find_ties(server: ServerProcess, case: dict[str, Any], margin: float) -> list[tuple[int, float]]:
    """Every position where the choice was not the oracle's, as (position, how much the oracle preferred its own), which
    is less than ``margin``. After one the sequence goes on from the oracle's tokens."""
    ties, done = [], 0
    while done < NUM_TOKENS:
        ours = complete(server, case["prompt"] + case["tokens"][:done], NUM_TOKENS - done)
        expected = case["tokens"][done:]
        differing = [index for index, pair in enumerate(zip(ours, expected, strict=True)) if pair[0] != pair[1]]
        if not differing:
            break
        position = done + differing[0]
        ids, logits = case["top_ids"][position], case["top_logits"][position]
        token = ours[differing[0]]
        assert token in ids, f"position {position}: token {token} is not among the oracle's best {ids}"
        gap = logits[0] - logits[ids.index(token)]
        assert gap < margin, f"position {position}: the oracle prefers {ids[0]} to {token} by {gap}"
        ties.append((position, round(gap, 4)))
        done = position + 1
    return ties
