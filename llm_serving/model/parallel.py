"""Computes which part of a model each rank (agent) holds, for the server's memory plan and for the agents' loader.

    rank = (dp_index * pipeline_parallel + pp_index) * tensor_parallel + tp_index

Tensor parallelism divides every layer as Megatron-LM does (Shoeybi et al., 2019): query heads, intermediate columns and
vocabulary rows. Attention's output layer and the MLP's down layer are divided by inputs, so their results are summed
over the ranks. Pipeline parallelism divides the layers (GPipe, Huang et al., 2019). With data parallelism, each replica
has the whole model.

- A rank has whole key-value heads with their query heads. If the heads do not divide evenly, some ranks have one more.
  If there are more ranks than key-value heads, several ranks hold the same key-value head and divide its query heads.
- Intermediate columns (of the MLP, of every expert) are divided as evenly as possible, in multiples of a number of
  columns that ``granule_of`` returns.
- With ``expert_parallel``, a rank has whole experts instead of columns of every expert. The routers stay whole.
- With linear attention, a rank has whole key heads with their value heads, and the states of these heads in its layers.
- With latent attention, a rank has whole heads. The latent vectors of queries, keys and values stay whole.
- Vocabulary rows are divided into ranges of equal length (``vocab_stride``); only the last one may be shorter. Logits
  that are gathered in order of rank are therefore in order of token id, with padding only at the end.
- If the layers do not divide evenly, the first stages have one layer more. The last stage has the output layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm_serving.config.parallel_section import ParallelConfig
    from llm_serving.model.shape import ModelShape

PREFERRED_GRANULE = 32
"""If possible, ranks get multiples of this number of columns. Kernels then compute whole tiles. 32 columns of a 16-bit
type have 64 bytes.
"""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Position of a rank. All indices count from 0.

    ``dp_index`` is the number of the rank's replica, ``pp_index`` the number of its pipeline stage, and ``tp_index``
    its index among the agents of this stage.
    """

    rank: int
    tp_index: int
    pp_index: int
    dp_index: int


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open range of integers ``start <= i < stop``."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, index: int) -> bool:
        return self.start <= index < self.stop

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the model that one rank holds. The spans are indices into the whole model."""

    query_heads: Span
    key_value_heads: Span
    intermediate: Span
    """The rank's columns of the MLP's gate and up layers."""
    expert_intermediate: Span
    """The rank's columns of each expert. Empty for a model without experts."""
    vocab: Span
    """The rank's token ids: rows of the output layer, and of the embedding if it is divided."""
    vocab_stride: int
    """Number of vocabulary rows of each rank. Only the last rank may have fewer rows, and pads its logits to this
    number.
    """
    layers: Span
    is_first_stage: bool
    """If True, the rank has the embedding."""
    is_last_stage: bool
    """If True, the rank has the last norm and the output layer."""
    shared_intermediate: Span = Span(0, 0)
    """The rank's columns of the shared experts. Empty for a model without shared experts."""
    experts: Span | None = None
    """The experts that the rank has. None: all of them."""
    delta_heads: Span = Span(0, 0)
    """The rank's key heads of linear attention. Empty for a model without linear attention. Consecutive value heads
    share a key head.
    """


def place(rank: int, parallel: ParallelConfig) -> RankPlace:
    """Returns the position of ``rank``. Raises ValueError if the rank does not exist."""
    if not 0 <= rank < parallel.world_size:
        raise ValueError(f"there is no rank {rank} of {parallel.world_size}")
    rest, tp_index = divmod(rank, parallel.tensor_parallel)
    dp_index, pp_index = divmod(rest, parallel.pipeline_parallel)
    return RankPlace(rank, tp_index, pp_index, dp_index)


def group_ranks(replica: int, parallel: ParallelConfig) -> range:
    """Returns the ranks of one replica, in order."""
    return range(replica * parallel.group_size, (replica + 1) * parallel.group_size)


def answering_rank(replica: int, parallel: ParallelConfig) -> int:
    """Returns the rank of a replica that samples and writes results: the first rank of the last stage."""
    return group_ranks(replica, parallel).stop - parallel.tensor_parallel


def answers(rank: int, parallel: ParallelConfig) -> bool:
    """Returns True if this rank samples and writes results for its replica. With a draft model, it makes the drafts."""
    return rank == answering_rank(place(rank, parallel).dp_index, parallel)


def split_evenly(total: int, parts: int, index: int) -> Span:
    """Divides ``range(total)`` into ``parts`` ranges and returns the range with number ``index``. The first ``total %
    parts`` ranges are longer by 1.
    """
    size, longer = divmod(total, parts)
    start = index * size + min(index, longer)
    return Span(start, start + size + (index < longer))


def split_columns(total: int, parts: int, index: int, group: int = 1) -> Span:
    """Divides ``total`` columns into ``parts`` ranges and returns the range with number ``index``.

    Boundaries are multiples of ``granule_of(total, parts, group)`` columns.
    """
    granule = granule_of(total, parts, group)
    units = split_evenly(-(-total // granule), parts, index)
    return Span(min(units.start * granule, total), min(units.stop * granule, total))


def granule_of(total: int, parts: int, group: int = 1) -> int:
    """Returns the unit, in columns, by which columns are divided: a rank gets whole units.

    The unit is a multiple of ``group``, the number of inputs that share a scale. If possible, it is also a multiple of
    ``PREFERRED_GRANULE``.
    """
    granule = max(group, PREFERRED_GRANULE) if PREFERRED_GRANULE % group == 0 else group
    return granule if total >= granule * parts else group


def split_vocab(total: int, parts: int, index: int) -> tuple[Span, int]:
    """Divides ``total`` rows into ranges of equal length. Returns the range with number ``index``, and the common
    length.

    Only the last range may be shorter than this length.
    """
    stride = -(-total // parts)
    if stride >= PREFERRED_GRANULE:
        stride = -(-stride // PREFERRED_GRANULE) * PREFERRED_GRANULE
        if stride * (parts - 1) >= total:
            stride = -(-total // parts)
    return Span(min(index * stride, total), min((index + 1) * stride, total)), stride


def split_heads(num_query: int, num_key_value: int, parts: int, index: int) -> tuple[Span, Span]:
    """Returns the query heads and the key-value heads of part ``index`` of ``parts``.

    If there are more parts than key-value heads, each part has one key-value head. Parts with the same key-value head
    divide its query heads.
    """
    per_group = num_query // num_key_value
    if parts <= num_key_value:
        key_value = split_evenly(num_key_value, parts, index)
        return Span(key_value.start * per_group, key_value.stop * per_group), key_value
    head = next(h for h in range(num_key_value) if index in split_evenly(parts, num_key_value, h))
    sharers = split_evenly(parts, num_key_value, head)
    query = split_evenly(per_group, len(sharers), index - sharers.start)
    first = head * per_group
    return Span(first + query.start, first + query.stop), Span(head, head + 1)


def shard_of(shape: ModelShape, where: RankPlace, parallel: ParallelConfig, weight_group: int = 1) -> Shard:
    """Returns the part of a model that the rank at ``where`` holds.

    ``weight_group`` is the number of inputs that share a scale; 1 if all inputs of an output share one scale.
    """
    parts, index = parallel.tensor_parallel, where.tp_index
    query, key_value = split_heads(shape.num_attention_heads, shape.num_key_value_heads, parts, index)
    experts = shape.experts
    vocab, vocab_stride = split_vocab(shape.vocab_size, parts, index)
    columns, shared, held = Span(0, 0), Span(0, 0), None
    if experts is not None:
        shared = split_columns(experts.shared_size, parts, index, weight_group) if experts.shared_size else shared
        if parallel.expert_parallel:
            columns, held = Span(0, experts.intermediate_size), split_evenly(experts.count, parts, index)
        else:
            columns = split_columns(experts.intermediate_size, parts, index, weight_group)
    return Shard(
        query_heads=query,
        key_value_heads=key_value,
        intermediate=split_columns(shape.intermediate_size, parts, index, weight_group),
        expert_intermediate=columns,
        vocab=vocab,
        vocab_stride=vocab_stride,
        layers=split_evenly(shape.num_layers, parallel.pipeline_parallel, where.pp_index),
        is_first_stage=where.pp_index == 0,
        is_last_stage=where.pp_index == parallel.pipeline_parallel - 1,
        shared_intermediate=shared,
        experts=held,
        delta_heads=Span(0, 0) if shape.delta is None else split_evenly(shape.delta.key_heads, parts, index),
    )


def local_shape(shape: ModelShape, shard: Shard) -> ModelShape:
    """Returns the model's shape with the heads, columns and layers of one rank. Layers are numbered from 0.

    The vocabulary keeps its whole size.
    """
    layers = shard.layers
    experts = shape.experts
    if experts is not None:
        dense = tuple(layer - layers.start for layer in experts.dense_layers if layer in layers)
        experts = replace(
            experts,
            intermediate_size=len(shard.expert_intermediate),
            dense_layers=dense,
            shared_size=len(shard.shared_intermediate),
            first_held=0 if shard.experts is None else shard.experts.start,
            num_held=None if shard.experts is None else len(shard.experts),
        )
    delta = shape.delta
    if delta is not None:
        delta = delta.part(len(shard.delta_heads), range(layers.start, layers.stop))
    return replace(
        shape,
        delta=delta,
        num_layers=len(layers),
        num_attention_heads=len(shard.query_heads),
        num_key_value_heads=len(shard.key_value_heads),
        intermediate_size=len(shard.intermediate),
        full_attention_layers=tuple(n - layers.start for n in shape.full_attention_layers if n in layers),
        experts=experts,
    )


def find_obstacle(shape: ModelShape, parallel: ParallelConfig, weight_group: int = 1) -> tuple[str, str] | None:
    """Returns the first setting of ``parallel_config`` that the model does not permit, and the reason.

    None if the model permits all settings.
    """
    parts, stages = parallel.tensor_parallel, parallel.pipeline_parallel
    if stages > shape.num_layers:
        return "pipeline_parallel", f"the model has {shape.num_layers} layers, and each stage needs one"
    if parallel.expert_parallel and shape.experts is None:
        return "expert_parallel", "the model has no experts; use False"
    if parallel.expert_parallel and parts == 1:
        return "expert_parallel", "divides the experts among the agents of tensor_parallel, which is 1; use False"
    if parts == 1:
        return None
    problem = _head_obstacle(shape, parts, weight_group)
    sizes = {"intermediate columns": (shape.intermediate_size, weight_group)}
    if shape.experts is not None and parallel.expert_parallel:
        sizes["experts"] = (shape.experts.count, 1)
    elif shape.experts is not None:
        sizes["columns of an expert"] = (shape.experts.intermediate_size, weight_group)
    if shape.experts is not None and shape.experts.shared_size:
        sizes["columns of the shared experts"] = (shape.experts.shared_size, weight_group)
    for name, (total, group) in sizes.items():
        if problem is None and -(-total // group) < parts:
            kept = f", which its weights keep together in groups of {group}" if group > 1 else ""
            problem = f"the model has {total} {name}{kept}: at most {-(-total // group)} agents can share them"
    if problem is None and shape.vocab_size - (parts - 1) * -(-shape.vocab_size // parts) <= 0:
        problem = f"a vocabulary of {shape.vocab_size} gives some of {parts} agents no token"
    return None if problem is None else ("tensor_parallel", problem)


def _head_obstacle(shape: ModelShape, parts: int, weight_group: int) -> str | None:
    if shape.delta is not None:
        heads, width = shape.delta.key_heads, shape.delta.values // shape.delta.key_heads
        if parts > heads:
            return f"the model has {heads} key heads of linear attention: at most {heads} agents can share them"
        if any(split_evenly(heads, parts, index).start * width % weight_group for index in range(parts)):
            return _unaligned(weight_group, width)
    query, key_value = shape.num_attention_heads, shape.num_key_value_heads
    most = max(key_value, key_value * (query // key_value))
    if parts > most:
        return f"the model has {query} query heads: at most {most} agents can share them"
    splits = [split_heads(query, key_value, parts, index)[0] for index in range(parts)]
    if not all(splits):
        return f"{query} query heads in {key_value} groups give some of {parts} agents no head"
    if any(span.start * shape.value_dim % weight_group for span in splits):
        return _unaligned(weight_group, shape.value_dim)
    return None


def _unaligned(weight_group: int, head_width: int) -> str:
    return (
        f"the groups of {weight_group} weights do not end where the heads (of {head_width}) of the agents "
        f"do; use a smaller model_config.weight_group, or another number of agents"
    )
