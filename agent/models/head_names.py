"""Lists the parameters of heads, and the tensors of published checkpoints from which each parameter is made.

A head is a small network that guesses further tokens from hidden states of the model (``agent/models/heads.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from agent.models.names import norm_spec, renamed, weight_specs
from agent.weights import WeightPart, WeightSpec
from llm_serving.config.draft_model import Head
from llm_serving.model.families import FAMILIES
from llm_serving.model.shape import ModelShape

_FIRST_LAYER = "model.layers.0."
"""Prefix of the tensors of the first layer in a checkpoint of a model without an encoder."""


@dataclass(frozen=True, slots=True)
class MtpNames:
    """The names that a family's checkpoints use for the tensors of an MTP layer, without ``.weight``."""

    layer: str
    """The decoder layer, without a dot at the end."""
    embedding_norm: str
    state_norm: str
    projection: str
    """``embedding_norm`` and ``state_norm`` are the norms of the embedding and of the hidden state. ``projection`` is
    the linear layer after both.
    """
    norm: str
    """The norm before the output layer."""


def mtp_specs(shape: ModelShape, head: Head) -> list[WeightSpec]:
    """Returns the parameters of an MTP layer. Its output layer is the output layer of the model."""
    hidden, names = shape.hidden_size, _mtp_names(shape, head)
    projection = WeightPart(f"{names.projection}.weight", (hidden, 2 * hidden))
    return [
        norm_spec(shape, "embedding_norm.weight", f"{names.embedding_norm}.weight", hidden),
        norm_spec(shape, "state_norm.weight", f"{names.state_norm}.weight", hidden),
        WeightSpec("projection.weight", (projection,), "linear"),
        *_layer_specs(shape, ("layers.0.",), names.layer),
        norm_spec(shape, "norm.weight", f"{names.norm}.weight", hidden),
        _output(_output_name(shape) if head.shares_output else "lm_head.weight", shape),
    ]


def eagle_specs(shape: ModelShape, head: Head, prefix: str, layer_name: str) -> list[WeightSpec]:
    """Returns the parameters of an EAGLE-3 head. ``prefix`` begins the names of the head's tensors.

    ``layer_name`` is the name of the head's layer after the prefix.
    """
    hidden, theirs = shape.hidden_size, f"{prefix}{layer_name}"
    query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    widths = {"q_proj": query, "k_proj": key, "v_proj": key}
    parts = tuple(WeightPart(f"{theirs}.self_attn.{name}.weight", (each, 2 * hidden)) for name, each in widths.items())
    biases = tuple(WeightPart(f"{theirs}.self_attn.{name}.bias", (each,)) for name, each in widths.items())
    fused = WeightPart(f"{prefix}fc.weight", (hidden, len(head.layers) * head.hidden_size))
    taken = ("layers.0.attention.output.weight", "layers.0.post_attention_norm.weight", "layers.0.mlp.")
    return [
        WeightSpec("fused_projection.weight", (fused,), "linear"),
        norm_spec(shape, "layers.0.input_norm.weight", f"{theirs}.input_layernorm.weight", hidden),
        norm_spec(shape, "layers.0.state_norm.weight", f"{theirs}.hidden_norm.weight", hidden),
        WeightSpec("layers.0.attention.qkv.weight", parts, "linear", bias=biases if shape.attention_bias else ()),
        *_layer_specs(shape, taken, theirs),
        norm_spec(shape, "norm.weight", f"{prefix}norm.weight", hidden),
        _output("lm_head.weight", shape),
    ]


def _mtp_names(shape: ModelShape, head: Head) -> MtpNames:
    """Returns the names of DeepSeek-V3's MTP layer, or of Qwen3-Next and Qwen3.5.

    DeepSeek's MTP layer has the number after the model's last layer.
    """
    if FAMILIES[shape.architecture].hybrid:
        norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
        return MtpNames("mtp.layers.0", *norms, projection="mtp.fc", norm="mtp.norm")
    layer = f"model.layers.{head.layers[0]}"
    norms = (f"{layer}.enorm", f"{layer}.hnorm")
    return MtpNames(layer, *norms, projection=f"{layer}.eh_proj", norm=f"{layer}.shared_head.norm")


def _layer_specs(shape: ModelShape, taken: tuple[str, ...], layer: str) -> Iterator[WeightSpec]:
    """Yields parameters of the head's layer, with the tensor names of the head's checkpoint.

    These are the parameters of the model's first layer whose names begin with one of ``taken``. ``layer`` begins the
    names of the tensors in the head's checkpoint, also if the model's checkpoint has an encoder.
    """
    for spec in weight_specs(replace(shape, beside_encoder=False)):
        if spec.parameter.startswith(taken):
            yield renamed(spec, _FIRST_LAYER, f"{layer}.")


def _output_name(shape: ModelShape) -> str:
    """Returns the tensor name of the model's embedding."""
    encoder = shape.encoder_beside
    return f"{'model.' if encoder is None else encoder.text_prefix}embed_tokens.weight"


def _output(name: str, shape: ModelShape) -> WeightSpec:
    return WeightSpec("lm_head.weight", (WeightPart(name, (shape.vocab_size, shape.hidden_size)),), "linear")
