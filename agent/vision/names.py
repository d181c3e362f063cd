"""Lists the parameters of a vision encoder, and the tensors of an Idefics3 or SmolVLM checkpoint of each one."""

from __future__ import annotations

from collections.abc import Iterator

from agent.weights.layout import WeightPart, WeightSpec
from llm_serving.model.vision import VisionShape

_MODEL = "model.vision_model"
TEXT_PREFIX = "model.text_model."
"""Beginning of the names of the text model's tensors, instead of ``model.``."""


def vision_specs(vision: VisionShape, text_hidden: int) -> list[WeightSpec]:
    """Returns all parameters of the encoder and its connector. ``text_hidden`` is the text model's hidden size."""
    hidden, inner = vision.hidden_size, vision.intermediate_size
    patch = (hidden, 3, vision.patch_size, vision.patch_size)
    specs = [
        WeightSpec("patches.weight", (WeightPart(f"{_MODEL}.embeddings.patch_embedding.weight", patch),)),
        _vector("patches.bias", f"{_MODEL}.embeddings.patch_embedding.bias", hidden),
        WeightSpec(
            "positions",
            (WeightPart(f"{_MODEL}.embeddings.position_embedding.weight", (vision.num_patches, hidden)),),
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


def vision_tensors(vision: VisionShape, text_hidden: int) -> tuple[str, ...]:
    """Returns the names of the checkpoint's tensors that the text model does not have."""
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
