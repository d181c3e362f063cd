"""Small seeded models that MindFormers' classes serve as well as ours."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tools.seeded_families import FAMILY_VARIANTS
from tools.seeded_model import VARIANTS as LLAMAS
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
    "llama_tied": LLAMAS["gqa_tied"],
    "llama_untied": Variant({**LLAMAS["mha"].config, "num_key_value_heads": 2}, seed=32, dtype="float16"),
}
"""Norms of heads, biases, tied and separate output weights, groups of two and three queries, shards, three types."""

needs_mindformers = pytest.mark.skipif(
    find_spec("mindformers") is None, reason="the package mindformers is not installed: make test-mindformers"
)
