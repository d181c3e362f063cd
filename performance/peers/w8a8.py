"""Describes int8 weights and dynamic int8 activations for the ``config.json`` of a vLLM model (compressed-tensors).

This file uses only the standard library, because a peer's Python also imports it.
"""

from __future__ import annotations

from typing import Any

INT8_LIMIT = 127
"""Largest quantised weight."""


def w8a8_config() -> dict[str, Any]:
    """Returns the value of the key ``quantization_config``. All linear layers but ``lm_head`` are quantised."""
    common = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": "channel", "dynamic": False},
        "input_activations": {**common, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
