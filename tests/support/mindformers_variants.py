"""Small seeded models that both MindFormers' classes and this project's models can serve."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from performance.models.variants import FAMILY_VARIANTS, Variant
from performance.models.variants import VARIANTS as LLAMAS

_TIED = FAMILY_VARIANTS["qwen3_tied"]
_QWEN2 = {**FAMILY_VARIANTS["qwen2_tied"].config, "tie_word_embeddings": False}
_LLAMA = {**LLAMAS["mha"].config, "num_key_value_heads": 2, "num_hidden_layers": 2}
_MOE = {**FAMILY_VARIANTS["qwen3_moe"].config, "mlp_only_layers": []}
_ROPE_TYPES = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMAS["llama3_rope"].config["rope_scaling"],
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_scaled": {
        "rope_type": "yarn",
        "factor": 6.0,
        "original_max_position_embeddings": 48,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "attention_factor": 1.4,
    },
}

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
    "qwen3_yarn": Variant({**_TIED.config, "rope_scaling": _ROPE_TYPES["yarn"]}, seed=33),
    "qwen2_yarn_scaled": Variant({**_QWEN2, "rope_scaling": _ROPE_TYPES["yarn_scaled"]}, seed=34),
    **{
        f"llama_{kind}": Variant({**_LLAMA, "rope_scaling": scaling}, seed=35 + index)
        for index, (kind, scaling) in enumerate(_ROPE_TYPES.items())
    },
    "qwen3_moe": Variant(_MOE, seed=41, num_shards=2),
    "qwen3_moe_plain": Variant(
        {
            **_MOE,
            "norm_topk_prob": False,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "tie_word_embeddings": True,
            "rope_scaling": {**_ROPE_TYPES["yarn"], "original_max_position_embeddings": 80},
        },
        seed=40,
        dtype="bfloat16",
    ),
}
"""The tested models. They cover head norms, biases, tied and separate output weights, groups of two and three queries,
shards, three types and experts. They also cover every rotary scaling, with a trained context shorter than the texts.
MindFormers caches rotary tables per process, and the cache key ignores the factors of a scaling. Therefore any two
scalings here also differ in another value.
"""

needs_mindformers = pytest.mark.skipif(
    find_spec("mindformers") is None, reason="the package mindformers is not installed: make test-mindformers"
)
