"""What MindFormers calls the parameters of a decoder.

They are laid out as ours are without packing: [out, in], q, k and v one after the other, gate before up. Only names
differ, so checkpoints are read, checked and converted as for our own models.
"""

from __future__ import annotations

import re

from agent.models.names import weight_specs
from llm_serving.model_shape import ModelShape

_OUTSIDE_LAYERS = {
    "embedding.weight": "embedding.word_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
_IN_A_LAYER = {
    "input_norm": "input_layernorm",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.output": "self_attention.linear_proj",
    "attention.query_norm": "self_attention.q_layernorm",
    "attention.key_norm": "self_attention.k_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
    "mlp.gate_up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
}
_LAYER_PARAMETER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")


def mindformers_name(parameter: str) -> str:
    """Of one of our parameters, a weight or a bias."""
    if parameter in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[parameter]
    match = _LAYER_PARAMETER.fullmatch(parameter)
    assert match is not None, f"{parameter} is neither inside nor outside of a layer"
    return f"decoder.layers.{match[1]}.{_IN_A_LAYER[match[2]]}.{match[3]}"


def our_parameters(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter that is loaded, biases by themselves; an output weight that is the embedding is
    none of its own."""
    specs = [spec for spec in weight_specs(shape) if not spec.packed_only]
    biases = [spec.bias_spec() for spec in specs if spec.bias]
    return {spec.parameter: spec.shape for spec in [*specs, *biases]}
