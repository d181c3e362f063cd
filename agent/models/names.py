"""Lists the network's parameters, and the tensors of a Hugging Face checkpoint from which each parameter is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from agent.models.delta_names import delta_specs, prediction_names
from agent.vision.names import vision_tensors
from agent.weights import WeightPart, WeightSpec
from agent.weights.layout import HeadRows, RowsOf, StackedIn, rows_of
from llm_serving.model.families import FAMILIES, Experts
from llm_serving.model.parallel import Span
from llm_serving.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names that a model family's checkpoints use for the expert block, its router and an expert's matrices."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    is_stacked: bool = False
    """True if published checkpoints have the weights of all experts in two tensors: one for gate and up, one for down.
    ``_stacked_rows`` describes both tensors.
    """


_MODEL = "model."
"""The prefix of the tensors of a checkpoint without an encoder."""
_USUAL = ExpertNames()
_EXPERT_NAMES = {
    "MixtralForCausalLM": ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
    "GptOssForCausalLM": ExpertNames(router="router"),
    "Qwen3NextForCausalLM": ExpertNames(shared="shared_expert"),
    "Qwen3_5MoeForCausalLM": ExpertNames(shared="shared_expert", is_stacked=True),
}
"""Names of experts by architecture. All other architectures use the names ``_USUAL``."""


def weight_specs(shape: ModelShape) -> list[WeightSpec]:
    """Returns all parameters to load, in the order of the layers, with the names that they have in ``Llama``."""
    experts = _EXPERT_NAMES.get(shape.architecture, _USUAL)
    hidden, vocab = shape.hidden_size, shape.vocab_size
    embedding = _plain("embedding.weight", "model.embed_tokens.weight", vocab, hidden)
    specs = [embedding if shape.gemma is None else replace(embedding, factor=hidden**0.5)]
    for layer in range(shape.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        specs.append(norm_spec(shape, f"{ours}.input_norm.weight", f"{theirs}.input_layernorm.weight", hidden))
        if shape.has_cache(layer):
            attention = _attention_specs if shape.latent is None else _latent_specs
            specs.extend(attention(shape, f"{ours}.attention", f"{theirs}.self_attn"))
        else:
            specs.extend(delta_specs(shape, f"{ours}.attention", f"{theirs}.linear_attn"))
        specs.extend(_later_norms(shape, ours, theirs))
        if shape.has_experts(layer):
            specs.extend(_expert_specs(shape, f"{ours}.mlp", f"{theirs}.{experts.block}", experts))
        else:
            specs.extend(_mlp_specs(shape, f"{ours}.mlp", f"{theirs}.mlp"))
    specs.append(norm_spec(shape, "norm.weight", "model.norm.weight", hidden))
    tied = shape.tie_word_embeddings
    output = WeightPart("model.embed_tokens.weight" if tied else "lm_head.weight", (vocab, hidden))
    specs.append(WeightSpec("lm_head.weight", (output,), "linear", packed_only=shape.shares_output))
    if shape.vision is not None:
        return [_of_text_model(spec, shape.vision.text_prefix) for spec in specs]
    encoder = shape.encoder_beside
    return specs if encoder is None else [renamed(spec, _MODEL, encoder.text_prefix) for spec in specs]


def ignorable_suffixes(shape: ModelShape) -> tuple[str, ...]:
    """Returns beginnings and endings of the names of tensors that a checkpoint may contain and that are not loaded.

    A text that ends with "." is a beginning. Any other text is an ending.

    The tensors are the rotary frequencies (computed from ``config.json`` instead), the layers for multi-token
    prediction, and a vision encoder. If the output layer uses the embedding, a stored output weight is not loaded
    either.
    """
    names = ("rotary_emb.inv_freq", *_extra_names(shape))
    if shape.encoder_beside is not None:
        names = (*names, *shape.encoder_beside.encoder_prefixes)
    if shape.vision is not None:
        names = (*names, *vision_tensors(shape.vision, shape.hidden_size))
    return (*names, "lm_head.weight") if shape.tie_word_embeddings else names


def renamed(spec: WeightSpec, old: str, new: str) -> WeightSpec:
    """Returns ``spec`` with other names of tensors: ``new`` replaces ``old`` at the beginning of a name.

    Names that do not begin with ``old`` stay the same.
    """

    def name_of(name: str) -> str:
        return f"{new}{name.removeprefix(old)}" if name.startswith(old) else name

    def part_of(part: WeightPart) -> WeightPart:
        place, stacked = part.rows_of, part.stacked
        return replace(
            part,
            name=name_of(part.name),
            rows_of=None if place is None else replace(place, name=name_of(place.name)),
            stacked=None if stacked is None else replace(stacked, name=name_of(stacked.name)),
        )

    return replace(spec, parts=tuple(map(part_of, spec.parts)), bias=tuple(map(part_of, spec.bias)))


def _of_text_model(spec: WeightSpec, prefix: str) -> WeightSpec:
    """Returns a parameter with the tensor names of a checkpoint that also has a vision encoder.

    ``prefix`` is the prefix of the names of the text model's tensors.
    """
    parts = tuple(
        replace(part, name=part.name.replace("model.", prefix, 1)) if part.name.startswith("model.") else part
        for part in spec.parts
    )
    return replace(spec, parts=parts)


def _extra_names(shape: ModelShape) -> tuple[str, ...]:
    """Returns the names of all tensors of the layers for multi-token prediction, which the model does not load."""
    if shape.delta is not None:
        parts = [part for spec in weight_specs(replace(shape, beside_encoder=False)) for part in spec.parts]
        names = {part.name if part.rows_of is None else part.rows_of.name for part in parts}
        names |= {part.stacked.name for part in parts if part.stacked is not None}
        return prediction_names(sorted(names), shape.delta.full_layers[-1])
    if shape.num_extra_layers == 0:
        return ()
    last = shape.num_layers - 1
    longer = replace(shape, num_layers=shape.num_layers + shape.num_extra_layers)
    extra = [f"model.layers.{last + 1 + index}" for index in range(shape.num_extra_layers)]
    found = {part.name for spec in weight_specs(longer) for part in spec.tensors}
    ends = ("embed_tokens.weight", "enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
    own = [f"{layer}.{end}" for layer in extra for end in (*ends, "shared_head.head.weight")]
    return (*sorted(name for name in found if name.startswith(tuple(f"{layer}." for layer in extra))), *own)


def _attention_specs(shape: ModelShape, ours: str, theirs: str) -> Iterator[WeightSpec]:
    hidden, head_dim = shape.hidden_size, shape.head_dim
    query, key = shape.num_attention_heads * head_dim, shape.num_key_value_heads * head_dim
    widths = {"q_proj": query, "k_proj": key, "v_proj": key}
    parts = tuple(WeightPart(f"{theirs}.{name}.weight", (width, hidden)) for name, width in widths.items())
    if _is_joined(shape):
        parts = _rows_of(f"{theirs}.qkv_proj.weight", parts)
    if shape.partial_rotary_dim:
        parts = (*(_rotated_first(part, shape) for part in parts[:2]), parts[2])
    if shape.gated_attention:
        parts, gate = _without_gates(parts, shape)
        yield WeightSpec(f"{ours}.gate.weight", (gate,), "linear")
    biases = tuple(WeightPart(f"{theirs}.{name}.bias", (width,)) for name, width in widths.items())
    yield WeightSpec(f"{ours}.qkv.weight", parts, "linear", bias=biases if shape.attention_bias else ())
    output = WeightPart(f"{theirs}.o_proj.weight", (hidden, query))
    output_bias = (WeightPart(f"{theirs}.o_proj.bias", (hidden,)),) if shape.output_bias else ()
    yield WeightSpec(f"{ours}.output.weight", (output,), "linear", bias=output_bias)
    if shape.sinks:
        yield replace(_plain(f"{ours}.sinks", f"{theirs}.sinks", shape.num_attention_heads), float32=True)
    if shape.query_key_norm:
        query_norm = norm_spec(shape, f"{ours}.query_norm.weight", f"{theirs}.q_norm.weight", head_dim)
        if shape.gemma is not None:
            # The operators divide scores by the square root of the head size, but Gemma divides by another number. The
            # factor of the norm corrects this.
            query_norm = replace(query_norm, factor=(head_dim / shape.gemma.query_scalar) ** 0.5)
        key_norm = norm_spec(shape, f"{ours}.key_norm.weight", f"{theirs}.k_norm.weight", head_dim)
        for norm in (query_norm, key_norm):
            yield replace(norm, parts=(_rotated_first(norm.parts[0], shape),)) if shape.partial_rotary_dim else norm


def _latent_specs(shape: ModelShape, ours: str, theirs: str) -> Iterator[WeightSpec]:
    hidden, heads, latent = shape.hidden_size, shape.num_attention_heads, shape.latent
    assert latent is not None, "latent attention has sizes"
    queries, has_rank = heads * latent.head_dim, latent.query_rank > 0
    first = WeightPart(
        f"{theirs}.{'q_a_proj' if has_rank else 'q_proj'}.weight", (latent.query_rank or queries, hidden)
    )
    second = WeightPart(f"{theirs}.kv_a_proj_with_mqa.weight", (latent.cache_dim, hidden))
    yield WeightSpec(f"{ours}.joined.weight", (first, second), "linear")
    if has_rank:
        yield _plain(f"{ours}.query_norm.weight", f"{theirs}.q_a_layernorm.weight", latent.query_rank)
        query = WeightPart(f"{theirs}.q_b_proj.weight", (queries, latent.query_rank))
        yield WeightSpec(f"{ours}.query.weight", (query,), "linear")
    yield _plain(f"{ours}.latent_norm.weight", f"{theirs}.kv_a_layernorm.weight", latent.rank)
    stride = latent.nope_dim + latent.value_dim
    both = WeightPart(f"{theirs}.kv_b_proj.weight", (heads * stride, latent.rank))
    keys = HeadRows(heads, stride, Span(0, latent.nope_dim), transposed=True)
    values = HeadRows(heads, stride, Span(latent.nope_dim, stride))
    yield WeightSpec(f"{ours}.key_up.weight", (both,), "linear", head_rows=keys)
    yield WeightSpec(f"{ours}.value_up.weight", (both,), "linear", head_rows=values)
    output = WeightPart(f"{theirs}.o_proj.weight", (hidden, heads * latent.value_dim))
    yield WeightSpec(f"{ours}.output.weight", (output,), "linear")


def _mlp_specs(shape: ModelShape, ours: str, theirs: str) -> Iterator[WeightSpec]:
    gate_up, down = _gated_parts(theirs, shape.hidden_size, shape.intermediate_size, _USUAL)
    if _is_joined(shape):
        gate_up = _rows_of(f"{theirs}.gate_up_proj.weight", gate_up)
    yield WeightSpec(f"{ours}.gate_up.weight", gate_up, "gated_linear", activation=shape.hidden_act)
    yield WeightSpec(f"{ours}.down.weight", down, "linear")


def _expert_specs(shape: ModelShape, ours: str, theirs: str, names: ExpertNames) -> Iterator[WeightSpec]:
    experts = shape.experts
    assert experts is not None, "a layer with experts has a shape with experts"
    router = WeightPart(f"{theirs}.{names.router}.weight", (experts.count, shape.hidden_size))
    router_bias = (WeightPart(f"{theirs}.{names.router}.bias", (experts.count,)),) if experts.biased else ()
    yield WeightSpec(f"{ours}.router.weight", (router,), "linear", float32=True, bias=router_bias)
    yield from _all_experts(experts, ours, theirs, shape.hidden_size, names)
    if experts.routing is not None and experts.routing.corrected:
        correction = WeightPart(f"{theirs}.gate.e_score_correction_bias", (experts.count,))
        yield WeightSpec(f"{ours}.correction", (correction,), float32=True)
    if experts.shared_size:
        gate_up, down = _gated_parts(f"{theirs}.{names.shared}", shape.hidden_size, experts.shared_size, names)
        yield WeightSpec(f"{ours}.shared_gate_up.weight", gate_up, "gated_linear")
        yield WeightSpec(f"{ours}.shared_down.weight", down, "linear")
    if experts.shared_gate:
        gate = WeightPart(f"{theirs}.{names.shared}_gate.weight", (1, shape.hidden_size))
        yield WeightSpec(f"{ours}.shared_gate.weight", (gate,), "linear", float32=True)


def _all_experts(experts: Experts, ours: str, theirs: str, hidden: int, names: ExpertNames) -> Iterator[WeightSpec]:
    """Yields two parameters: the joined weights gate and up of all experts, and the weights down of all experts."""
    inner = experts.intermediate_size
    each = [_gated_parts(f"{theirs}.experts.{index}", hidden, inner, names) for index in range(experts.count)]
    gate_up, down = (tuple(part for expert in each for part in expert[place]) for place in (0, 1))
    gate_up_bias: tuple[WeightPart, ...] = ()
    down_bias: tuple[WeightPart, ...] = ()
    if experts.biased:
        gate_up, down = _stacked(gate_up, theirs, experts.count), _stacked(down, theirs, experts.count)
        gate_up_bias, down_bias = _stacked_biases(gate_up), _stacked_biases(down)
    if names.is_stacked:
        gate_up, down = _stacked_rows(gate_up, theirs, experts.count), _stacked_rows(down, theirs, experts.count)
    yield WeightSpec(
        f"{ours}.gate_up.weight", gate_up, "gated_linear", bias=gate_up_bias, experts=experts.count,
        activation=experts.activation,
    )  # fmt: skip
    yield WeightSpec(f"{ours}.down.weight", down, "linear", bias=down_bias, experts=experts.count)


def _stacked(parts: tuple[WeightPart, ...], theirs: str, count: int) -> tuple[WeightPart, ...]:
    """Returns ``parts``, the weights of ``count`` experts, each with its place in a tensor of gpt-oss's checkpoints.

    One tensor has the weights gate and up of all experts, with alternating outputs of gate and up. Another tensor has
    the weights down of all experts.
    """
    joined, name = _stacked_name(parts, theirs, count)
    return tuple(
        replace(part, stacked=StackedIn(name, count, index // joined, joined * part.shape[0], index % joined, joined))
        for index, part in enumerate(parts)
    )


def _stacked_rows(parts: tuple[WeightPart, ...], theirs: str, count: int) -> tuple[WeightPart, ...]:
    """Returns ``parts``, the weights of ``count`` experts, each with its place in a tensor of Qwen3.5's checkpoints.

    One tensor has the weights gate and up of all experts. For each expert, the rows of gate come before the rows of up.
    Another tensor has the weights down of all experts. In both tensors, the inputs are the last dimension.
    """
    joined, name = _stacked_name(parts, theirs, count)
    return tuple(
        replace(
            part,
            stacked=StackedIn(
                name, count, index // joined, joined * part.shape[0], index % joined * part.shape[0], inputs_last=True
            ),
        )
        for index, part in enumerate(parts)
    )


def _stacked_name(parts: tuple[WeightPart, ...], theirs: str, count: int) -> tuple[int, str]:
    """Returns how many of ``parts`` each of ``count`` experts has, and the name of the tensor with all ``parts``.

    The number is 2 if the tensor has the weights gate and up, and 1 if it has the weights down.
    """
    joined = len(parts) // count
    return joined, f"{theirs}.experts.{'gate_up_proj' if joined == 2 else 'down_proj'}"


def _stacked_biases(weights: tuple[WeightPart, ...]) -> tuple[WeightPart, ...]:
    """Returns the biases for ``weights``, the result of ``_stacked``. Each bias has the place of its weight, in the
    tensor of biases that belongs to the tensor of weights."""
    found = []
    for part in weights:
        assert part.stacked is not None, "the weights have their places"
        stacked = replace(part.stacked, name=f"{part.stacked.name}_bias")
        name = f"{part.name.removesuffix('.weight')}.bias"
        found.append(WeightPart(name, part.shape[:1], stacked=stacked))
    return tuple(found)


def _gated_parts(
    theirs: str, hidden: int, inner: int, names: ExpertNames
) -> tuple[tuple[WeightPart, ...], tuple[WeightPart, ...]]:
    """Returns the checkpoint tensors of a gated MLP: first (gate, up), which become one weight, then (down,)."""
    gate, up = (WeightPart(f"{theirs}.{name}.weight", (inner, hidden)) for name in (names.gate, names.up))
    return (gate, up), (WeightPart(f"{theirs}.{names.down}.weight", (hidden, inner)),)


def _later_norms(shape: ModelShape, ours: str, theirs: str) -> Iterator[WeightSpec]:
    """Yields the norm before the MLP. For Gemma, also yields the norms of the results of attention and MLP."""
    hidden, name = shape.hidden_size, "post_attention_layernorm"
    if shape.gemma is not None:
        yield norm_spec(shape, f"{ours}.attention_result_norm.weight", f"{theirs}.{name}.weight", hidden)
        yield norm_spec(shape, f"{ours}.mlp_result_norm.weight", f"{theirs}.post_feedforward_layernorm.weight", hidden)
        name = "pre_feedforward_layernorm"
    yield norm_spec(shape, f"{ours}.post_attention_norm.weight", f"{theirs}.{name}.weight", hidden)


def norm_spec(shape: ModelShape, parameter: str, name: str, size: int) -> WeightSpec:
    """Returns the weight of a norm.

    Gemma, Qwen3-Next and Qwen3.5 multiply by 1 + weight. For these families, the parameter is the sum 1 + weight in
    float32.
    """
    spec = _plain(parameter, name, size)
    return spec if not shape.adds_one_to_norms else replace(spec, offset=1.0, float32=True)


def _is_joined(shape: ModelShape) -> bool:
    return FAMILIES[shape.architecture].joined


def _rows_of(name: str, parts: tuple[WeightPart, ...]) -> tuple[WeightPart, ...]:
    """Returns ``parts``, each with its rows in the checkpoint's tensor ``name``. This tensor has the rows of all parts,
    one part after another."""
    whole = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return tuple(replace(part, rows_of=RowsOf(name, whole, rows.start)) for part, rows in rows_of(parts))


def _without_gates(parts: tuple[WeightPart, ...], shape: ModelShape) -> tuple[tuple[WeightPart, ...], WeightPart]:
    """Returns the weights of queries, keys and values, and the weight of the output gates.

    In the checkpoint's query weight, the rows of each query head are followed by the rows of its gate.
    """
    size, query = shape.head_dim, parts[0]
    order = tuple(range(size)) if query.rows_of is None else query.rows_of.head_order
    whole = (2 * query.shape[0], *query.shape[1:])
    place = RowsOf(query.name, whole, 0, order, stored_head=2 * size)
    gates = replace(place, head_order=tuple(range(size, 2 * size)))
    gate = WeightPart(f"{query.name.removesuffix('q_proj.weight')}gate.weight", query.shape, gates)
    return (replace(query, rows_of=place), *parts[1:]), gate


def _rotated_first(part: WeightPart, shape: ModelShape) -> WeightPart:
    """Returns a weight or a norm of queries or keys, with the rows of each head in the order that the operators need.

    The checkpoint rotates the first r elements of a head, in pairs of elements i and i + r / 2. The operators rotate
    pairs of elements that are half a head apart. So the second half of the r elements moves to the second half of the
    head. Scores of queries and keys do not depend on the order of their elements.
    """
    rotated, size = shape.rotary_dim, shape.head_dim
    half, unrotated = rotated // 2, (size - rotated) // 2
    ranges = ((0, half), (rotated, rotated + unrotated), (half, rotated), (rotated + unrotated, size))
    order = tuple(row for first, end in ranges for row in range(first, end))
    place = part.rows_of or RowsOf(part.name, part.shape, 0)
    return replace(part, rows_of=replace(place, head_order=order))


def _plain(parameter: str, name: str, *sizes: int) -> WeightSpec:
    return WeightSpec(parameter, (WeightPart(name, sizes),))
