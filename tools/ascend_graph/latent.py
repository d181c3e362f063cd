"""Checks the primitives of multi-head latent attention in a graph.

The rules cover the rotary embedding, the rows of the cache, the matrix products per head, and PagedAttention.
docs/lab/ascend.md names the sources of the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from llm_serving.model.deepseek import LatentAttention
from llm_serving.model.shape import ModelShape
from tools.ascend_graph.listing import Wiring
from tools.ascend_graph.mind_ir import Node, Operand, TensorType

LATENT_PRIMITIVES = frozenset({"BatchMatMul", "Concat", "Transpose"})
"""Primitives that only latent attention has."""
_HALVES, _PAIRS = 2, 3
_BY_HEADS = (1, 0, 2)
_MASKED = -10000.0
"""Value of a masked position in float16. In bfloat16, this value is 1."""

Rule = Callable[[Node], Iterator[str]]
TypeOf = Callable[[Operand], TensorType | None]


class LatentRules:
    """Finds errors in the attention of a model with latent attention."""

    def __init__(self, wiring: Wiring, type_of: TypeOf, shape: ModelShape, latent: LatentAttention, dtype: str) -> None:
        """``shape`` has the sizes of the agent's part of the model. ``dtype`` is the short name of the activations'
        type.
        """
        self._wiring, self._type_of, self._latent, self._dtype = wiring, type_of, latent, dtype
        self._heads, self._layers = shape.num_attention_heads, shape.num_layers
        self._hidden = shape.hidden_size
        self.checks: dict[str, Rule] = {
            "ApplyRotaryPosEmb": self._rotary_problems,
            "BatchMatMul": self._product_problems,
            "PagedAttention": self._attention_problems,
            "ReshapeAndCache": self._write_problems,
        }

    @property
    def num_products(self) -> int:
        """Number of a layer's matrix products in attention, without the BatchMatMul that multiply head by head."""
        return 3 if self._latent.query_rank else 2

    def counts(self) -> dict[str, int]:
        """Returns how often each primitive of latent attention must be in the graph."""
        norms = 2 if self._latent.query_rank else 1
        each = {"BatchMatMul": 2, "Concat": 2, "Transpose": 4, "PagedAttention": 1, "FlashAttentionScore": 0}
        return {name: count * self._layers for name, count in each.items()} | {"RmsNorm": 1 + norms * self._layers}

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of those attention weights of a layer that stay floats in every weight format."""
        latent, heads = self._latent, self._heads
        return {
            "attention.key_up.weight": (heads, latent.nope_dim, latent.rank),
            "attention.value_up.weight": (heads, latent.rank, latent.value_dim),
        }

    def float_weights(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the layer's other attention weights, if the weight format is a float format."""
        latent, queries = self._latent, self._heads * self._latent.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "attention.joined.weight": ((latent.query_rank or queries) + latent.cache_dim, self._hidden),
            "attention.output.weight": (self._hidden, self._heads * latent.value_dim),
        }
        return shapes | ({"attention.query.weight": (queries, latent.query_rank)} if latent.query_rank else {})

    def _rotary_problems(self, node: Node) -> Iterator[str]:
        query, key, cos, sin, _, cos_format = self._wiring.operands(node)
        rope = self._latent.rope_dim
        widths = {"query": self._heads * rope, "key": rope, "cos": rope, "sin": rope}
        for (name, width), operand in zip(widths.items(), (query, key, cos, sin), strict=True):
            yield from self._differs(name, operand, (-1, width))
        wanted = _PAIRS if self._latent.interleaved else _HALVES
        if cos_format.value != wanted:
            yield f"cos_format is {cos_format.value}; the model's is {wanted} (2: halves of a head, 3: adjacent pairs)"

    def _write_problems(self, node: Node) -> Iterator[str]:
        key, value, key_cache, value_cache, slots = self._wiring.operands(node)
        yield from self._differs("key", key, (-1, self._latent.cache_dim))
        row = self._wiring.node_of(key)
        parts = [] if row is None or row.primitive != "Concat" else self._wiring.operands(row)[:2]
        origins = [self._primitive(part) for part in parts]
        if origins != ["RmsNorm", "ApplyRotaryPosEmb"]:
            yield f"the row of the cache joins {origins}; it must be the normalised latent vector and the rotated key"
        for name, operand in (("value", value), ("value_cache", value_cache)):
            if operand.kind != "constant" or operand.value is not None:
                yield f"{name} is given; latent attention has one cache"
        yield from self._cache_problems(node, key_cache)
        source, _ = self._wiring.source(slots)
        if source.name != "slot_mapping":
            yield f"slot_mapping is {source.name or source.kind}, not the graph's input of that name"

    def _product_problems(self, node: Node) -> Iterator[str]:
        x, weight, *transposes = self._wiring.operands(node)
        if [each.value for each in transposes] != [False, False]:
            yield "the operands must be [heads, tokens, in] and [heads, in, out], without transposes"
        swap = self._wiring.node_of(x)
        if swap is None or swap.primitive != "Transpose" or self._wiring.operands(swap)[1].value != _BY_HEADS:
            yield f"x must come from Transpose with the order {_BY_HEADS}"
        source, _ = self._wiring.source(weight)
        stem = f"layers.{node.layer}."
        wanted = {stem + name: shape for name, shape in self.weights().items()}
        if source.name not in wanted:
            yield f"the weight is {source.name or source.kind}, not one of {', '.join(wanted)}"
        else:
            yield from self._differs(source.name, weight, wanted[source.name])

    def _attention_problems(self, node: Node) -> Iterator[str]:
        operands = self._wiring.operands(node)
        yield from self._differs("query", operands[0], (-1, self._heads * self._latent.cache_dim))
        for operand in operands[1:3]:
            yield from self._cache_problems(node, operand)
        given = tuple(operands[at].value for at in (10, 12, 15))
        wanted = (self._heads, 1, self._latent.rank)
        if given != wanted:
            yield f"head_num, kv_head_num and mla_v_dim are {given}; the model has {wanted}"
        scale = self._latent.score_factor * self._latent.head_dim**-0.5
        if not np.isclose(operands[11].value, scale, rtol=1e-6):
            yield f"scale_value is {operands[11].value:.7g}; the model's is {scale:.7g}"
        result = TensorType(self._dtype, (-1, self._heads * self._latent.rank))
        if node.results[0] != result:
            yield f"the result is {node.results[0]}; it must be {result}"
        yield from self._mask_problems(operands[7])

    def _mask_problems(self, mask: Operand) -> Iterator[str]:
        """Yields an error unless the mask of a step with several queries has the values that the kernel requires.

        Source: vllm-mindspore, model_executor/models/attention_mask.py ("MLA + Q_seqlen > 1").
        """
        node = self._wiring.node_of(mask)
        if node is None:
            return
        wanted = 1.0 if self._dtype == "bf16" else _MASKED
        factor = self._wiring.operands(node)[1].value if node.primitive == "Mul" else None
        if factor is None or not np.isclose(float(np.asarray(factor, np.float32).reshape(-1)[0]), wanted, rtol=0.01):
            yield f"attn_mask hides keys with {factor}; with latent attention in {self._dtype} it must be {wanted:g}"

    def _cache_problems(self, node: Node, operand: Operand) -> Iterator[str]:
        source, _ = self._wiring.source(operand)
        if source.name != f"layers.{node.layer}.attention.latent_cache":
            yield f"the cache is {source.name or source.kind}, not the layer's own"
        elif source.type is None or source.type.shape[2:] != (1, self._latent.cache_dim):
            yield f"the cache is {source.type}; it must be [blocks, block size, 1, {self._latent.cache_dim}]"

    def _primitive(self, operand: Operand) -> str:
        node = self._wiring.node_of(operand)
        return operand.kind if node is None else node.primitive

    def _differs(self, name: str, operand: Operand, shape: tuple[int, ...]) -> Iterator[str]:
        actual, wanted = self._type_of(operand), TensorType(self._dtype, shape)
        if actual != wanted:
            yield f"{name} is {actual}; it must be {wanted}"
