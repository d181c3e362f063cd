"""Decides which part of each tensor an agent loads, for the parameters of a decoder (``agent.models.names``).

The split follows Megatron-LM (Shoeybi et al. 2019). The layers of queries, keys, values, gate and up are split by their
outputs. The layers after them (attention output, down) are split by their inputs. Therefore the outputs that an agent
computes in the first layer are the inputs that it needs in the second layer. Embedding and output layer are split by
the vocabulary. Every agent has all norms and expert routers. If a layer is split by inputs, only the first agent has
the bias, so that the sum over the agents contains the bias once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agent.group.model_part import ModelPart
from agent.weights.cuts import TensorCut
from agent.weights.forms import LinearForms, linear_forms
from agent.weights.layout import WeightPart, WeightSpec
from agent.weights.packed import Packing
from agent.weights.source import CutSource, WeightSource
from llm_serving.errors import AgentStartError
from llm_serving.model.parallel import Span

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EMBEDDING, _OUTPUT, _NORM = "embedding.weight", "lm_head.weight", "norm.weight"


@dataclass(frozen=True, slots=True)
class ShardedSpecs:
    """The parameters that an agent loads. ``cuts`` maps tensor names to the part that is read.

    Tensors that are not in ``cuts`` are read whole.
    """

    specs: tuple[WeightSpec, ...]
    cuts: dict[str, TensorCut]


def shard_specs(specs: Sequence[WeightSpec], part: ModelPart, *, equal_vocabularies: bool) -> ShardedSpecs:
    """Returns the parameters that one agent loads. The layers of the agent's stage are counted from 0.

    ``specs`` are the parameters of the whole model, and ``part`` is the agent's part of the model. With
    ``equal_vocabularies``, each agent has the same number of vocabulary rows. Rows of zeros follow the end of the
    vocabulary if necessary. Raises AgentStartError if there is no rule for splitting a parameter.
    """
    split = _split_specs(specs, part, equal_vocabularies=equal_vocabularies)
    kept = []
    for spec in split.specs:
        own = _own_stage(spec, part)
        if own is not None:
            kept.append(own if part.is_split else replace(own, input_spans=_input_spans(own, part)))
    return ShardedSpecs(tuple(kept), split.cuts)


def part_forms(specs: Sequence[WeightSpec], part: ModelPart, source: WeightSource, packing: Packing) -> LinearForms:
    """Returns the forms in which the native primitives take the weights of ``part``.

    ``specs`` are the parameters of the whole model. Agents of different pipeline stages get the same forms. Raises
    ConfigError if the primitives do not support a format.
    """
    split = _split_specs(specs, part, equal_vocabularies=True)
    return linear_forms(split.specs, CutSource(source, split.cuts), packing)


def _split_specs(specs: Sequence[WeightSpec], part: ModelPart, *, equal_vocabularies: bool) -> ShardedSpecs:
    """Splits the parameters of all stages among the agents that share layers."""
    if not part.is_split:
        return ShardedSpecs(tuple(specs), {})
    cuts: dict[str, TensorCut] = {}
    split = tuple(_split(spec, part, cuts, equal_vocabularies=equal_vocabularies) for spec in specs)
    return ShardedSpecs(split, cuts)


def _own_stage(spec: WeightSpec, part: ModelPart) -> WeightSpec | None:
    """Returns a parameter with its name in this pipeline stage, which counts its layers from 0. Returns None if the
    parameter belongs to another stage.
    """
    shard, layer = part.shard, _LAYER.fullmatch(spec.parameter)
    if layer is not None:
        number = int(layer[1])
        if number not in shard.layers:
            return None
        return replace(spec, parameter=f"layers.{number - shard.layers.start}.{layer[2]}")
    if spec.parameter == _EMBEDDING:
        return spec if shard.is_first_stage else None
    if not shard.is_last_stage:
        return None
    # A tied output layer can use the embedding only if this stage has the embedding.
    return replace(spec, packed_only=spec.packed_only and shard.is_first_stage)


def _split(spec: WeightSpec, part: ModelPart, cuts: dict[str, TensorCut], *, equal_vocabularies: bool) -> WeightSpec:
    name = spec.parameter if spec.parameter in (_EMBEDDING, _OUTPUT, _NORM) else _end_of(spec.parameter)
    if name not in _RULES:
        raise AgentStartError(
            f"the parameter {spec.parameter} cannot be divided among {part.parallel.tensor_parallel} agents; "
            "set parallel_config.tensor_parallel: 1"
        )
    spec = _RULES[name](spec, part, cuts)
    if equal_vocabularies and spec.parameter in (_EMBEDDING, _OUTPUT):
        return replace(spec, padded_rows=part.vocab_stride)
    return spec


def _input_spans(spec: WeightSpec, part: ModelPart) -> tuple[Span, ...]:
    """Returns the ranges of inputs that a layer multiplies separately before it adds the products.

    With these ranges, a single agent adds in the same order as a group of ``parallel_config.sum_parts`` agents. The
    result is empty for a layer with one product over all inputs.
    """
    name = _end_of(spec.parameter)
    if name == "attention.output.weight":
        return tuple(_of_heads(shard.query_heads, part) for shard in part.sum_shards)
    if name == "mlp.down.weight":
        return tuple(shard.intermediate for shard in part.sum_shards)
    return ()


def _end_of(parameter: str) -> str:
    """Removes the layer from a parameter's name: ``layers.3.attention.qkv.weight`` becomes ``attention.qkv.weight``."""
    layer = _LAYER.fullmatch(parameter)
    return parameter if layer is None else layer[2]


Rule = Callable[[WeightSpec, ModelPart, dict[str, TensorCut]], WeightSpec]


def _whole(spec: WeightSpec, part: ModelPart, cuts: dict[str, TensorCut]) -> WeightSpec:
    return spec


def _heads(spec: WeightSpec, part: ModelPart, cuts: dict[str, TensorCut]) -> WeightSpec:
    """Restricts the joined weight of q, k and v, and its biases, to the rows of the agent's heads. Adds these ranges to
    ``cuts``."""
    query, key_value = (_of_heads(span, part) for span in (part.shard.query_heads, part.shard.key_value_heads))
    rows = (query, key_value, key_value)
    parts = tuple(_cut(each, cuts, span) for each, span in zip(spec.parts, rows, strict=True))
    biases = tuple(_cut(each, cuts, span) for each, span in zip(spec.bias, rows, strict=False))
    return replace(spec, parts=parts, bias=biases)


def _joined(spec: WeightSpec, part: ModelPart, cuts: dict[str, TensorCut]) -> WeightSpec:
    """Restricts the first weight of latent attention, which joins queries and latent vectors, to the agent's part.

    The agent has the query rows of its own heads, and all rows that produce latent vectors.
    """
    latent = part.whole.latent
    assert latent is not None, "only latent attention has this parameter"
    if latent.query_rank:
        return spec
    queries, latents = spec.parts
    return replace(spec, parts=(_cut(queries, cuts, _of_query_heads(part)), latents))


def _queries(spec: WeightSpec, part: ModelPart, cuts: dict[str, TensorCut]) -> WeightSpec:
    return replace(spec, parts=tuple(_cut(each, cuts, _of_query_heads(part)) for each in spec.parts))


def _head_rows(spec: WeightSpec, part: ModelPart, cuts: dict[str, TensorCut]) -> WeightSpec:
    """Restricts a weight to the rows of the agent's heads. The checkpoint stores the keys and values of all heads in
    one tensor.
    """
    rows, heads = spec.head_rows, part.shard.query_heads
    assert rows is not None, "the weight consists of heads"
    span = Span(heads.start * rows.stride, heads.stop * rows.stride)
    parts = tuple(_cut(each, cuts, span) for each in spec.parts)
    return replace(spec, parts=parts, head_rows=replace(rows, heads=len(heads)))


def _of_each_head(spec: WeightSpec, part: ModelPart, cuts: dict[str, TensorCut]) -> WeightSpec:
    """Restricts a vector with one element for each query head, such as the sinks, to the agent's heads."""
    return replace(spec, parts=tuple(_cut(each, cuts, part.shard.query_heads) for each in spec.parts))


def _from_heads(spec: WeightSpec, part: ModelPart, cuts: dict[str, TensorCut]) -> WeightSpec:
    """Restricts the output layer of attention to the inputs that come from the agent's heads."""
    layer, whole = _LAYER.fullmatch(spec.parameter), part.whole
    assert layer is not None, "the output layer belongs to a layer"
    span = _scaled(part.shard.query_heads, whole.value_dim)
    if whole.delta is not None and not whole.has_cache(int(layer[1])):
        span = _scaled(part.shard.delta_heads, whole.delta.values // whole.delta.key_heads)
    return _columns(spec, part, cuts, span)


def _delta(spec: WeightSpec, part: ModelPart, cuts: dict[str, TensorCut]) -> WeightSpec:
    """Restricts a parameter of linear attention to the rows of the agent's key heads and their value heads.

    Each part of the parameter has the same number of rows for every key head. These rows belong to the key head itself
    or to its value heads. So each part is cut at multiples of this number.
    """
    delta, heads = part.whole.delta, part.shard.delta_heads
    assert delta is not None, "only linear attention has this parameter"
    parts = (_cut(each, cuts, _scaled(heads, each.shape[0] // delta.key_heads)) for each in spec.parts)
    return replace(spec, parts=tuple(parts))


def _to_intermediate(spec: WeightSpec, part: ModelPart, cuts: dict[str, TensorCut]) -> WeightSpec:
    """Restricts the weights gate and up to the agent's rows. With experts, restricts every expert to these rows.

    If each agent has whole experts instead, returns all rows of the agent's own experts.
    """
    if spec.experts and part.shard.experts is not None:
        return _own_experts(spec, part.shard.experts)
    span = _intermediate(spec, part)
    biases = tuple(_cut(each, cuts, span) for each in spec.bias)
    return replace(spec, parts=tuple(_cut(each, cuts, span) for each in spec.parts), bias=biases)


def _from_intermediate(spec: WeightSpec, part: ModelPart, cuts: dict[str, TensorCut]) -> WeightSpec:
    if spec.experts and part.shard.experts is not None:
        return _own_experts(spec, part.shard.experts)
    return _columns(spec, part, cuts, _intermediate(spec, part))


def _own_experts(spec: WeightSpec, held: Span) -> WeightSpec:
    each = len(spec.parts) // spec.experts
    own = slice(held.start * each, held.stop * each)
    return replace(spec, parts=spec.parts[own], bias=spec.bias[own], experts=len(held))


def _to_shared(spec: WeightSpec, part: ModelPart, cuts: dict[str, TensorCut]) -> WeightSpec:
    return replace(spec, parts=tuple(_cut(each, cuts, part.shard.shared_intermediate) for each in spec.parts))


def _from_shared(spec: WeightSpec, part: ModelPart, cuts: dict[str, TensorCut]) -> WeightSpec:
    return _columns(spec, part, cuts, part.shard.shared_intermediate)


def _vocabulary(spec: WeightSpec, part: ModelPart, cuts: dict[str, TensorCut]) -> WeightSpec:
    return replace(spec, parts=tuple(_cut(each, cuts, part.shard.vocab) for each in spec.parts))


_RULES: dict[str, Rule] = {
    _EMBEDDING: _vocabulary,
    _OUTPUT: _vocabulary,
    _NORM: _whole,
    "input_norm.weight": _whole,
    "post_attention_norm.weight": _whole,
    "attention_result_norm.weight": _whole,
    "mlp_result_norm.weight": _whole,
    "attention.query_norm.weight": _whole,
    "attention.key_norm.weight": _whole,
    "attention.sinks": _of_each_head,
    "attention.qkv.weight": _heads,
    "attention.output.weight": _from_heads,
    "attention.joined.weight": _joined,
    "attention.query.weight": _queries,
    "attention.latent_norm.weight": _whole,
    "attention.gate.weight": _queries,
    "attention.projection.weight": _delta,
    "attention.convolution": _delta,
    "attention.log_rate": _delta,
    "attention.rate_bias": _delta,
    "attention.norm.weight": _whole,
    "attention.key_up.weight": _head_rows,
    "attention.value_up.weight": _head_rows,
    "mlp.router.weight": _whole,
    "mlp.gate_up.weight": _to_intermediate,
    "mlp.down.weight": _from_intermediate,
    "mlp.correction": _whole,
    "mlp.shared_gate.weight": _whole,
    "mlp.shared_gate_up.weight": _to_shared,
    "mlp.shared_down.weight": _from_shared,
}


def _of_heads(span: Span, part: ModelPart) -> Span:
    return _scaled(span, part.whole.head_dim)


def _scaled(span: Span, size: int) -> Span:
    """Returns the elements of a range of heads that have ``size`` elements each."""
    return Span(span.start * size, span.stop * size)


def _of_query_heads(part: ModelPart) -> Span:
    """Returns the range of rows of the agent's query heads in the weight of the queries."""
    return _of_heads(part.shard.query_heads, part)


def _intermediate(spec: WeightSpec, part: ModelPart) -> Span:
    return part.shard.expert_intermediate if spec.experts else part.shard.intermediate


def _columns(spec: WeightSpec, part: ModelPart, cuts: dict[str, TensorCut], span: Span) -> WeightSpec:
    """Restricts a layer to the agent's input columns ``span``. The products are summed over the agents, so only the
    first agent has the bias."""
    parts = tuple(_cut(each, cuts, Span(0, each.shape[0]), span) for each in spec.parts)
    return replace(spec, parts=parts, bias=spec.bias if part.place.tp_index == 0 else ())


def _cut(whole: WeightPart, cuts: dict[str, TensorCut], rows: Span, columns: Span | None = None) -> WeightPart:
    cut = cuts[whole.name] = TensorCut(whole.shape, rows, columns)
    return WeightPart(whole.name, cut.shape)
