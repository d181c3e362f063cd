"""Lists the parameters of a vision encoder, and the tensors of a checkpoint from which each parameter is made.

The checkpoints of Idefics3 and SmolVLM use other names than those of Qwen2.5-VL.
"""

from __future__ import annotations

from collections.abc import Iterator

from agent.weights.layout import WeightPart, WeightSpec
from llm_serving.model.vision import VisionShape

_MODEL = "model.vision_model"


def vision_specs(vision: VisionShape, text_hidden: int) -> list[WeightSpec]:
    """Returns all parameters of the encoder and its connector. ``text_hidden`` is the text model's hidden size."""
    return _siglip_specs(vision, text_hidden) if vision.windows is None else _qwen_specs(vision, text_hidden)


def _siglip_specs(vision: VisionShape, text_hidden: int) -> list[WeightSpec]:
    hidden, inner = vision.hidden_size, vision.intermediate_size
    patch = (hidden, 3, vision.patch_size, vision.patch_size)
    specs = [
        WeightSpec("patches.weight", (WeightPart(f"{_MODEL}.embeddings.patch_embedding.weight", patch),)),
        _vector("patches.bias", f"{_MODEL}.embeddings.patch_embedding.bias", hidden),
        WeightSpec(
            "positions",
            (WeightPart(f"{_MODEL}.embeddings.position_embedding.weight", (vision.patches_per_side**2, hidden)),),
            float32=True,
        ),
    ]
    for layer in range(vision.num_layers):
        theirs = f"{_MODEL}.encoder.layers.{layer}"
        specs += _norm(f"{layer}.norm1", f"{theirs}.layer_norm1", hidden)
        attention = f"{theirs}.self_attn"
        specs.append(_linear(f"{layer}.qkv", [f"{attention}.{name}_proj" for name in "qkv"], hidden, hidden))
        specs.append(_linear(f"{layer}.output", [f"{attention}.out_proj"], hidden, hidden))
        specs += _norm(f"{layer}.norm2", f"{theirs}.layer_norm2", hidden)
        specs.append(_linear(f"{layer}.up", [f"{theirs}.mlp.fc1"], inner, hidden))
        specs.append(_linear(f"{layer}.down", [f"{theirs}.mlp.fc2"], hidden, inner))
    specs += _norm("norm", f"{_MODEL}.post_layernorm", hidden)
    connector = WeightPart("model.connector.modality_projection.proj.weight", (text_hidden, vision.connector_inputs))
    specs.append(WeightSpec("connector", (connector,), "linear"))
    return specs


def _qwen_specs(vision: VisionShape, text_hidden: int) -> list[WeightSpec]:
    assert vision.windows is not None, "the encoder of Qwen2.5-VL has windows"
    hidden, inner, joined = vision.hidden_size, vision.intermediate_size, vision.connector_inputs
    patch = (hidden, 3, vision.windows.frames, vision.patch_size, vision.patch_size)
    specs = [WeightSpec("patches.weight", (WeightPart("visual.patch_embed.proj.weight", patch),))]
    for layer in range(vision.num_layers):
        theirs = f"visual.blocks.{layer}"
        specs.append(_vector(f"{layer}.norm1.weight", f"{theirs}.norm1.weight", hidden))
        specs.append(_linear(f"{layer}.qkv", [f"{theirs}.attn.qkv"], 3 * hidden, hidden))
        specs.append(_linear(f"{layer}.output", [f"{theirs}.attn.proj"], hidden, hidden))
        specs.append(_vector(f"{layer}.norm2.weight", f"{theirs}.norm2.weight", hidden))
        gate_up = [f"{theirs}.mlp.{name}_proj" for name in ("gate", "up")]
        specs.append(_linear(f"{layer}.gate_up", gate_up, inner, hidden))
        specs.append(_linear(f"{layer}.down", [f"{theirs}.mlp.down_proj"], hidden, inner))
    specs.append(_vector("norm.weight", "visual.merger.ln_q.weight", hidden))
    specs.append(_linear("join", ["visual.merger.mlp.0"], joined, joined))
    specs.append(_linear("connector", ["visual.merger.mlp.2"], text_hidden, joined))
    return specs


def vision_tensors(vision: VisionShape, text_hidden: int) -> tuple[str, ...]:
    """Returns the names of the checkpoint's tensors that belong to the encoder and its connector."""
    return tuple(part.name for spec in vision_specs(vision, text_hidden) for part in spec.tensors)


def _linear(parameter: str, names: list[str], outputs: int, inputs: int) -> WeightSpec:
    weights = tuple(WeightPart(f"{name}.weight", (outputs, inputs)) for name in names)
    biases = tuple(WeightPart(f"{name}.bias", (outputs,)) for name in names)
    return WeightSpec(parameter, weights, "linear", bias=biases)


def _norm(parameter: str, name: str, size: int) -> Iterator[WeightSpec]:
    yield _vector(f"{parameter}.weight", f"{name}.weight", size)
    yield _vector(f"{parameter}.bias", f"{name}.bias", size)


def _vector(parameter: str, name: str, size: int) -> WeightSpec:
    return WeightSpec(parameter, (WeightPart(name, (size,)),), float32=True)
