"""The linear layers of a model that may have LoRA adapters, by the names that the layers have in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.model.families import FAMILIES
from llm_serving.model.shape import ModelShape

ADAPTED_FAMILIES = frozenset(
    {
        *("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
        *("Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Phi3ForCausalLM"),
        *("Gemma3ForCausalLM", "GptOssForCausalLM", "Idefics3ForConditionalGeneration"),
        *("SmolVLMForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    }
)
"""Architectures that support LoRA. Before a further architecture is added here, its linear layers must apply adapters.
"""


@dataclass(frozen=True, slots=True)
class Target:
    """A linear layer: its name in a checkpoint, without ``.weight``, and its numbers of inputs and outputs."""

    name: str
    inputs: int
    outputs: int

    def parameters(self, rank: int) -> int:
        """Returns the number of values in both matrices of an adapter of this layer."""
        return rank * (self.inputs + self.outputs)


def lora_targets(shape: ModelShape) -> dict[str, Target]:
    """Returns the layers that may have adapters, in the order of the model.

    These are the linear layers of attention, of linear attention and of dense MLPs. Experts, and the matrices of latent
    attention that are multiplied head by head, cannot have adapters.

    The keys are the names of the modules in transformers. In models that read images, they may differ from the names of
    the tensors in the checkpoint.
    """
    vision = shape.vision
    prefix, module = ("model.", "model.") if vision is None else (vision.text_prefix, vision.text_module)
    if shape.encoder_beside is not None:
        prefix = shape.encoder_beside.text_prefix
    layers = range(shape.num_layers)
    targets = [each for layer in layers for each in _of_layer(shape, f"{prefix}layers.{layer}", layer)]
    return {module + target.name.removeprefix(prefix): target for target in targets}


def largest_adapter(shape: ModelShape, max_rank: int) -> int:
    """Returns the number of values of an adapter with the rank ``max_rank`` in every layer that may have one."""
    return sum(target.parameters(max_rank) for target in lora_targets(shape).values())


def stacked_values(shape: ModelShape, max_rank: int) -> int:
    """Returns the number of values that an adapter slot has with native operators.

    These operators join the adapters of layers with the same inputs, for example q, k and v, to one matrix A and one
    matrix B.
    """
    groups = joined_targets(shape)
    return sum(max_rank * len(group) * (group[0].inputs + sum(each.outputs for each in group)) for group in groups)


def joined_targets(shape: ModelShape) -> list[list[Target]]:
    """Returns the layers that may have adapters. Layers with the same inputs are in one list."""
    prefixes = ((f"model.layers.{layer}", layer) for layer in range(shape.num_layers))
    return [group for prefix, layer in prefixes for group in _groups_of_layer(shape, prefix, layer)]


def _of_layer(shape: ModelShape, prefix: str, layer: int) -> list[Target]:
    return [target for group in _groups_of_layer(shape, prefix, layer) for target in group]


def _groups_of_layer(shape: ModelShape, prefix: str, layer: int) -> list[list[Target]]:
    """Returns the targets of a layer. Targets with the same inputs are in one list."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    if not shape.has_cache(layer):
        attention = _of_linear_attention(shape, prefix)
    elif shape.latent is not None:
        attention = _of_latent_attention(shape, prefix)
    else:
        attention = _of_attention(shape, prefix)
    groups = [attention[:-1], attention[-1:]]
    if not shape.has_experts(layer):
        gates = {"gate_up_proj": 2 * inner} if _is_joined(shape) else {"gate_proj": inner, "up_proj": inner}
        groups.append([Target(f"{prefix}.mlp.{name}", hidden, width) for name, width in gates.items()])
        groups.append([Target(f"{prefix}.mlp.down_proj", inner, hidden)])
    return groups


def _is_joined(shape: ModelShape) -> bool:
    return FAMILIES[shape.architecture].joined


def _of_attention(shape: ModelShape, prefix: str) -> list[Target]:
    hidden, dim = shape.hidden_size, shape.head_dim
    query, key = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
    joined = {"qkv_proj": query + 2 * key}
    rows = 2 * query if shape.gated_attention else query  # q_proj also computes the gate
    widths = joined if _is_joined(shape) else {"q_proj": rows, "k_proj": key, "v_proj": key}
    found = [Target(f"{prefix}.self_attn.{name}", hidden, width) for name, width in widths.items()]
    return [*found, Target(f"{prefix}.self_attn.o_proj", query, hidden)]


def _of_linear_attention(shape: ModelShape, prefix: str) -> list[Target]:
    """Returns the targets of a layer with Gated DeltaNet.

    Qwen3.5 has four separate input projections. Qwen3-Next joins them into two.
    """
    delta, hidden = shape.delta, shape.hidden_size
    assert delta is not None, "only a hybrid model has this layer"
    heads = delta.value_heads
    widths = {"qkv": delta.channels, "z": delta.values, "b": heads, "a": heads}
    if shape.architecture == "Qwen3NextForCausalLM":
        widths = {"qkvz": delta.channels + delta.values, "ba": 2 * heads}
    found = [Target(f"{prefix}.linear_attn.in_proj_{name}", hidden, width) for name, width in widths.items()]
    return [*found, Target(f"{prefix}.linear_attn.out_proj", delta.values, hidden)]


def _of_latent_attention(shape: ModelShape, prefix: str) -> list[Target]:
    latent = shape.latent
    assert latent is not None
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    first = ("q_a_proj", latent.query_rank) if latent.query_rank else ("q_proj", heads * latent.head_dim)
    widths = (first, ("kv_a_proj_with_mqa", latent.cache_dim))
    found = [Target(f"{prefix}.self_attn.{name}", hidden, width) for name, width in widths]
    return [*found, Target(f"{prefix}.self_attn.o_proj", heads * latent.value_dim, hidden)]
