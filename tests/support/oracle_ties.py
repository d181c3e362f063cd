"""Compares greedy tokens with an oracle's tokens.

Where two logits are nearly equal (a tie), rounding may make either token the best.
"""

from __future__ import annotations

from typing import Any

from support.server_process import ServerProcess

NUM_TOKENS = 64

# Maximum distance between two of the oracle's logits that rounding may reverse. The best logits of the golden models
# are between 8 and 16. There, float16 rounds to multiples of 0.0078 and bfloat16 to multiples of 0.0625.
TIE_MARGIN = {"float16": 0.02, "bfloat16": 0.35}
MOST_TIES = {"float16": 0.01, "bfloat16": 0.05}
"""Maximum fraction of positions at which a test accepts a tie of the best logits, by data type."""
RELATIVE_TIE_MARGIN = {"float16": 0.01, "bfloat16": 0.1}
"""The margin of a tie as a multiple of the standard deviation of the oracle's logits, for any model."""


def check_forced(
    cases: list[dict[str, Any]], forced: list[list[int]], dtype: str, most_ties: float, label: str
) -> None:
    """Checks the greedy tokens of a model. At each position, the model gets the oracle's earlier tokens as input.

    A greedy token that differs from the oracle's token is a tie. In the oracle's logits, it must be within the margin
    of the best logit. At most a fraction ``most_ties`` of the positions may be ties.
    """
    margins = []
    for case, tokens in zip(cases, forced, strict=True):
        limit = RELATIVE_TIE_MARGIN[dtype] * case["logit_std"]
        for step, token in enumerate(tokens):
            if token != case["tokens"][step]:
                top_ids, top_logits = case["top_ids"][step], case["top_logits"][step]
                assert token in top_ids, f"prompt of {len(case['prompt'])}, token {step}: {token} is not near the best"
                margins.append(top_logits[0] - top_logits[top_ids.index(token)])
                assert margins[-1] < limit, f"prompt of {len(case['prompt'])}, token {step}: {margins[-1]} >= {limit}"
    total = sum(len(tokens) for tokens in forced)
    print(f"{label}: {len(margins)} ties in {total} tokens, widest {max(margins, default=0):.3f}")
    assert len(margins) <= most_ties * total


def complete(server: ServerProcess, prompt: list[int], count: int, **sampling: Any) -> list[int]:
    """Returns the output tokens of a request. The request is greedy unless ``sampling`` contains other parameters."""
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = server.post("/v1/completions", {**body, **sampling})
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def find_ties(server: ServerProcess, case: dict[str, Any], margin: float) -> list[tuple[int, float]]:
    """Returns every position where the server's token differs from the oracle's, with the difference of their logits.

    The logits are the oracle's, and their difference must be less than ``margin``. After a tie, the next request
    continues from the oracle's tokens.
    """
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
