"""Small random models of every family and variant that the server supports.

Each feature that differs from a plain Llama changes the text. Norms of heads are not 1, and biases are as large as the
products. Windows are shorter than the prompts, and prompts exceed the original context of scaled rotary embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variant:
    """A model: the content of its ``config.json``, the element type of its weights, and the number of shards."""

    config: Mapping[str, Any]
    seed: int
    dtype: str = "float32"
    num_shards: int = 1
    logit_scale: float = 4.0
    """Approximate standard deviation of the logits."""

    def config_json(self) -> dict[str, Any]:
        common = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": self.dtype,
        }
        return {**common, **self.config}


VARIANTS: dict[str, Variant] = {
    "mha": Variant(
        {
            "vocab_size": 1024,
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
        },
        seed=1,
        num_shards=3,
    ),
    "gqa_tied": Variant(
        {
            "vocab_size": 1536,
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
        },
        seed=2,
        dtype="bfloat16",
    ),
    "llama3_rope": Variant(
        {
            "vocab_size": 768,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        seed=3,
    ),
}


def _config(architecture: str, model_type: str, **values: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": 419,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    return {"architectures": [architecture], "model_type": model_type, **sizes, **values}


def _llama(**values: Any) -> dict[str, Any]:
    return _config("LlamaForCausalLM", "llama", **values)


def _qwen2(**values: Any) -> dict[str, Any]:
    return _config("Qwen2ForCausalLM", "qwen2", rope_theta=1e6, rms_norm_eps=1e-6, **values)


def _qwen3(**values: Any) -> dict[str, Any]:
    return _config("Qwen3ForCausalLM", "qwen3", rope_theta=1e6, rms_norm_eps=1e-6, head_dim=32, **values)


def _qwen3_moe(**values: Any) -> dict[str, Any]:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "head_dim": 32}
    return _config("Qwen3MoeForCausalLM", "qwen3_moe", **{**experts, "rms_norm_eps": 1e-6, **values})


FAMILY_VARIANTS: dict[str, Variant] = {
    "llama_linear_mqa": Variant(
        _llama(vocab_size=331, num_key_value_heads=1, rope_scaling={"rope_type": "linear", "factor": 4.0}),
        seed=11,
        dtype="float16",
    ),
    "llama_dynamic": Variant(
        _llama(max_position_embeddings=128, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), seed=12
    ),
    "llama_yarn_bias": Variant(
        _llama(
            attention_bias=True,
            rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
        ),
        seed=13,
        num_shards=2,
    ),
    "mistral_window": Variant(
        _config("MistralForCausalLM", "mistral", sliding_window=40, num_hidden_layers=3), seed=14, num_shards=2
    ),
    "mistral_full": Variant(
        _config("MistralForCausalLM", "mistral", sliding_window=None, head_dim=24, rope_theta=1e6),
        seed=15,
        dtype="bfloat16",
    ),
    "mixtral": Variant(
        _config(
            "MixtralForCausalLM",
            "mixtral",
            num_local_experts=6,
            num_experts_per_tok=2,
            sliding_window=48,
            rope_theta=1e6,
        ),
        seed=133,
        num_shards=2,
        dtype="bfloat16",
    ),
    "qwen2_tied": Variant(
        _qwen2(hidden_size=96, num_attention_heads=6, tie_word_embeddings=True, vocab_size=401),
        seed=16,
        dtype="bfloat16",
    ),
    "qwen2_yarn_window": Variant(
        _qwen2(
            num_hidden_layers=3,
            use_sliding_window=True,
            sliding_window=24,
            max_window_layers=1,
            max_position_embeddings=256,
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        seed=17,
        dtype="float16",
    ),
    "qwen3_tied": Variant(_qwen3(tie_word_embeddings=True, hidden_size=96, num_hidden_layers=3), seed=18),
    "qwen3_window": Variant(
        _qwen3(use_sliding_window=True, sliding_window=30, max_window_layers=1, attention_bias=True), seed=19
    ),
    "qwen3_moe": Variant(
        _qwen3_moe(norm_topk_prob=True, num_hidden_layers=3, mlp_only_layers=[1]), seed=20, num_shards=2
    ),
    "qwen3_moe_plain": Variant(
        _qwen3_moe(norm_topk_prob=False, decoder_sparse_step=2, num_experts=5, num_experts_per_tok=2),
        seed=21,
        dtype="bfloat16",
    ),
}
