"""Maps this project's parameter names to the names of MindFormers.

MindFormers' parameters have the same layout as this project's weights without packing: [out, in], and [experts, in,
out] for experts. One parameter joins q, k and v, and another joins gate and up. Only MindFormers' Llama has separate
parameters for q, k, v, gate and up. Checkpoints are read, checked and converted in the same way as for this project's
models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from agent.models.names import weight_specs as our_specs
from agent.weights import WeightSpec
from llm_serving.model.shape import ModelShape

_LAYER_PARAMETER = re.compile(r"layers\.(\d+)\.(.+)\.([a-z_]+)")
_STACKED = {"qkv": ("query", "key", "value"), "gate_up": ("gate", "up")}


@dataclass(frozen=True, slots=True)
class Names:
    """Maps this project's parameter names to the names of one kind of MindFormers model."""

    outside: Mapping[str, str]
    layers: str
    """The prefix of MindFormers' names of all parameters in layers."""
    inside: Mapping[str, str]
    """Maps this project's name of a parameter in a layer to MindFormers' name. Both are without the ending ``weight``
    or ``bias``.

    If MindFormers' name has neither of these endings, the key is this project's full name, for example
    ``mlp.down.weight``.
    """
    stacked: bool
    """True if q, k and v are one parameter, and gate and up are one parameter."""

    def theirs(self, parameter: str) -> str:
        """Returns MindFormers' name of a parameter of this project."""
        if parameter in self.outside:
            return self.outside[parameter]
        match = _LAYER_PARAMETER.fullmatch(parameter)
        assert match is not None, f"{parameter} is neither inside nor outside of a layer"
        whole = self.inside.get(f"{match[2]}.{match[3]}") or f"{self.inside[match[2]]}.{match[3]}"
        return f"{self.layers}.{match[1]}.{whole}"


GPT_NAMES = Names(
    outside={
        "embedding.weight": "embedding.word_embeddings.weight",
        "norm.weight": "decoder.final_layernorm.weight",
        "lm_head.weight": "output_layer.weight",
    },
    layers="decoder.layers",
    inside={
        "input_norm": "input_layernorm",
        "attention.qkv": "self_attention.linear_qkv",
        "attention.output": "self_attention.linear_proj",
        "attention.query_norm": "self_attention.q_layernorm",
        "attention.key_norm": "self_attention.k_layernorm",
        "post_attention_norm": "pre_mlp_layernorm",
        "mlp.gate_up": "mlp.linear_fc1",
        "mlp.down": "mlp.linear_fc2",
    },
    stacked=True,
)
"""Parameter names of MindFormers' ``GPTModel``, which all newer models use."""

MOE_NAMES = replace(
    GPT_NAMES,
    inside={
        **GPT_NAMES.inside,
        "mlp.router": "mlp.router",
        "mlp.gate_up.weight": "mlp.experts.weight1",
        "mlp.down.weight": "mlp.experts.weight2",
    },
)
"""Parameter names of a MindFormers ``GPTModel`` in which all layers have experts."""

LLAMA_NAMES = Names(
    outside={
        "embedding.weight": "model.tok_embeddings.embedding_weight",
        "norm.weight": "model.norm_out.weight",
        "lm_head.weight": "lm_head.weight",
    },
    layers="model.layers",
    inside={
        "input_norm": "attention_norm",
        "attention.query": "attention.wq",
        "attention.key": "attention.wk",
        "attention.value": "attention.wv",
        "attention.output": "attention.wo",
        "attention": "attention.infer_attention.paged_attention_mgr",
        "post_attention_norm": "ffn_norm",
        "mlp.gate": "feed_forward.w1",
        "mlp.up": "feed_forward.w3",
        "mlp.down": "feed_forward.w2",
    },
    stacked=False,
)
"""Parameter names of the Llama of MindFormers' older library, whose layers own the KV cache."""


def names_of(architecture: str) -> Names:
    """Returns the parameter names of MindFormers' model for an ``architectures`` entry."""
    return {"LlamaForCausalLM": LLAMA_NAMES, "Qwen3MoeForCausalLM": MOE_NAMES}.get(architecture, GPT_NAMES)


def weight_specs(shape: ModelShape) -> list[WeightSpec]:
    """Returns every parameter to load, with this project's names.

    This project's models join q, k and v to one parameter, and gate and up to another. If MindFormers' model does not
    join them, the result has five separate parameters: q, k, v, gate and up.
    """
    specs = our_specs(shape)
    return specs if names_of(shape.architecture).stacked else [part for spec in specs for part in _split(spec)]


def our_parameters(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter to load, by its name.

    Biases are separate parameters. If the output layer uses the embedding as its weight, the result has no output
    weight.
    """
    specs = [spec for spec in weight_specs(shape) if not spec.packed_only]
    biases = [spec.bias_spec("float32") for spec in specs if spec.bias]  # the type does not change the shape
    return {spec.parameter: _loaded_shape(spec) for spec in [*specs, *biases]}


def _loaded_shape(spec: WeightSpec) -> tuple[int, ...]:
    """Returns the shape that ``load_weights`` gives to a parameter. ``load_weights`` transposes the weights of experts.
    """
    if not spec.experts:
        return spec.shape
    experts, rows, depth = spec.shape
    return experts, depth, rows


def cache_names(num_layers: int) -> list[tuple[str, str]]:
    """Returns this project's names of each layer's key cache and value cache."""
    return [(f"layers.{i}.attention.key_cache", f"layers.{i}.attention.value_cache") for i in range(num_layers)]


def _split(spec: WeightSpec) -> Iterator[WeightSpec]:
    stem, _, name = spec.parameter.removesuffix(".weight").rpartition(".")
    if name not in _STACKED:
        yield spec
        return
    for part, of in zip(spec.parts, _STACKED[name], strict=True):
        yield replace(spec, parameter=f"{stem}.{of}.weight", parts=(part,), kind="linear")
