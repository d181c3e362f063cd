"""Draws random bodies for /v1/completions with every kind of sampling. The same seed gives the same body."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any


def mixed_body(draw: random.Random, index: int, prompt: object, max_tokens: Sequence[int]) -> dict[str, Any]:
    """Returns a body with a random combination of sampling parameters.

    It is greedy or random, with or without penalties, log-probabilities and the end at an end token.
    """
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": draw.choice(max_tokens),
        "temperature": 0.0,
        "logprobs": draw.choice([0, 3]),
        "return_token_ids": True,
        "ignore_eos": draw.random() < 0.7,
    }
    if draw.random() < 0.6:
        body |= {"temperature": draw.choice([0.7, 1.0, 1.3]), "seed": index, "top_p": draw.choice([1.0, 0.9])}
        body |= {"top_k": draw.choice([0, 20]), "min_p": draw.choice([0.0, 0.05])}
    if draw.random() < 0.3:
        body |= {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    return body
