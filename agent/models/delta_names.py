"""Lists the parameters of Gated DeltaNet, and the tensors of Qwen's checkpoints from which each parameter is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from agent.weights import WeightPart, WeightSpec
from agent.weights.layout import RowsOf, rows_of
from llm_serving.model.gated_delta import GatedDelta
from llm_serving.model.shape import ModelShape


def delta_specs(shape: ModelShape, ours: str, theirs: str) -> Iterator[WeightSpec]:
    """Yields the parameters of one layer. ``ours`` is the prefix of the parameters' names, ``theirs`` that of the
    tensors' names.
    """
    delta, hidden = shape.delta, shape.hidden_size
    assert delta is not None, "only a hybrid model has this layer"
    is_grouped = shape.architecture == "Qwen3NextForCausalLM"
    parts = _grouped_projection(delta, hidden, theirs) if is_grouped else _projection(delta, hidden, theirs)
    yield WeightSpec(f"{ours}.projection.weight", parts, "linear")
    convolution = _channels(f"{theirs}.conv1d.weight", delta, (1, delta.taps))
    yield WeightSpec(f"{ours}.convolution", convolution, float32=True)
    yield _float32(f"{ours}.log_rate", f"{theirs}.A_log", delta.value_heads)
    yield _float32(f"{ours}.rate_bias", f"{theirs}.dt_bias", delta.value_heads)
    yield _float32(f"{ours}.norm.weight", f"{theirs}.norm.weight", delta.value_dim)
    yield WeightSpec(
        f"{ours}.output.weight", (WeightPart(f"{theirs}.out_proj.weight", (hidden, delta.values)),), "linear"
    )


def prediction_names(names: Sequence[str], full_layer: int) -> tuple[str, ...]:
    """Returns the names of the checkpoint's tensors for multi-token prediction. The model does not load them.

    The tensors are a decoder layer with full attention, a linear layer and three norms. The decoder layer has the same
    tensors as the model's layer ``full_layer``. ``names`` are the names of the model's tensors.
    """
    own_layer = f"model.layers.{full_layer}."
    layer = tuple(name.replace(own_layer, "mtp.layers.0.") for name in names if name.startswith(own_layer))
    own = ("fc.weight", "norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
    return (*layer, *(f"mtp.{name}" for name in own))


def _projection(delta: GatedDelta, hidden: int, theirs: str) -> tuple[WeightPart, ...]:
    """Returns the parts of the first linear layer of Gated DeltaNet, in this order.

    These are queries, keys, values, output gates (z), write strengths (b) and decays (a). The checkpoint has one tensor
    for queries, keys and values together.
    """
    sizes = {"z": delta.values, "b": delta.value_heads, "a": delta.value_heads}
    others = (WeightPart(f"{theirs}.in_proj_{name}.weight", (size, hidden)) for name, size in sizes.items())
    return (*_channels(f"{theirs}.in_proj_qkv.weight", delta, (hidden,)), *others)


def _channels(name: str, delta: GatedDelta, rest: tuple[int, ...]) -> tuple[WeightPart, ...]:
    """Splits the tensor ``name`` [channels, ...] into three parts: the rows of queries, of keys and of values.

    Agents can divide each part by heads. ``rest`` has the tensor's sizes after the first.
    """
    sizes = {"q": delta.keys, "k": delta.keys, "v": delta.values}
    parts = tuple(WeightPart(f"{name}.{letter}", (size, *rest)) for letter, size in sizes.items())
    whole = (delta.channels, *rest)
    return tuple(replace(part, rows_of=RowsOf(name, whole, rows.start)) for part, rows in rows_of(parts))


def _grouped_projection(delta: GatedDelta, hidden: int, theirs: str) -> tuple[WeightPart, ...]:
    """Returns the parts of Qwen3-Next's first linear layer: queries, keys, values, gates (z), strengths (b), decays
    (a).

    The checkpoint's two tensors are grouped by key head. A group of the first tensor has the rows of the query, the
    key, the values and z. A group of the second tensor has b and a of its value heads.
    """
    shared = delta.value_heads // delta.key_heads
    values = shared * delta.value_dim
    sizes = (delta.key_dim, delta.key_dim, values, values)
    first = _groups(f"{theirs}.in_proj_qkvz.weight", "qkvz", sizes, delta, hidden)
    return (*first, *_groups(f"{theirs}.in_proj_ba.weight", "ba", (shared, shared), delta, hidden))


def _groups(name: str, letters: str, sizes: tuple[int, ...], delta: GatedDelta, hidden: int) -> Iterator[WeightPart]:
    """Yields the parts of a tensor whose rows form one group for each key head.

    ``letters`` names the parts of a group in their order, one letter for each part. ``sizes`` has the number of rows of
    each of these parts.
    """
    group, begin = sum(sizes), 0
    for letter, size in zip(letters, sizes, strict=True):
        order = tuple(range(begin, begin + size))
        rows = RowsOf(name, (delta.key_heads * group, hidden), 0, order, stored_head=group)
        yield WeightPart(f"{name}.{letter}", (delta.key_heads * size, hidden), rows)
        begin += size


def _float32(parameter: str, name: str, size: int) -> WeightSpec:
    return WeightSpec(parameter, (WeightPart(name, (size,)),), float32=True)
