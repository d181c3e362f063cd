"""Small seeded models that MindFormers' classes serve as well as ours."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tools.seeded_families import FAMILY_VARIANTS
from tools.seeded_model import Variant

_TIED = FAMILY_VARIANTS["qwen3_tied"]

VARIANTS: dict[str, Variant] = {
    "qwen3_tied": _TIED,
    "qwen3_untied": Variant(
        {**_TIED.config, "tie_word_embeddings": False, "num_attention_heads": 6, "num_key_value_heads": 3},
        seed=31,
        dtype="bfloat16",
        num_shards=2,
    ),
    "qwen2_tied": FAMILY_VARIANTS["qwen2_tied"],
}
"""Norms of heads, biases, tied and separate output weights, groups of two and three queries, shards, two types."""

needs_mindformers = pytest.mark.skipif(
    find_spec("mindformers") is None, reason="the package mindformers is not installed: make test-mindformers"
)
