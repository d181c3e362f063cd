"""Defines small random models of every family and variant that the server supports, read from ``variants.json``.

Their sizes and weights are chosen so that each feature that differs from a plain Llama changes the generated text. The
weights of query and key norms are not 1, and biases are large enough to matter. Sliding windows are shorter than the
prompts. If the rotary embedding is scaled, the prompts are longer than the original context.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
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


_FAMILY_SIZES = {
    "vocab_size": 419,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
"""Default sizes for the models of ``FAMILY_VARIANTS``, for keys that ``variants.json`` does not contain."""


def _read(group: str, **defaults: Any) -> dict[str, Variant]:
    """Reads one group of variants from ``variants.json``. ``defaults`` are entries of ``config.json`` for all of them.
    """
    content = json.loads(Path(__file__).with_name("variants.json").read_text(encoding="utf-8"))
    variants = {}
    for name, fields in content[group].items():
        config = fields.pop("config")
        kind = {key: config[key] for key in ("architectures", "model_type") if key in config}
        variants[name] = Variant({**kind, **defaults, **config}, **fields)
    return variants


VARIANTS = _read("plain")
"""Plain Llamas of three sizes."""
FAMILY_VARIANTS = _read("families", **_FAMILY_SIZES)
"""Models of all families, each with features that differ from a plain Llama."""
