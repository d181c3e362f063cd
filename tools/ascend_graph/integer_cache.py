"""Checks the int8 KV cache of a graph: how keys and values are quantised, written, gathered and dequantised.

``agent.backends.native.integer_cache`` builds these primitives. docs/lab/ascend.md names the sources of the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llm_serving.config.sections import PagedAttentionConfig
from llm_serving.model.number_formats import scale_row_width
from llm_serving.model.shape import ModelShape
from tools.ascend_graph.listing import Wiring
from tools.ascend_graph.mind_ir import Node, Operand, TensorType

INTEGER_CACHE_PRIMITIVES = frozenset({"Concat", "Sub"})
"""Primitives that only an int8 cache needs."""
INTEGER_CACHE_INPUTS = {"step_blocks": 1}
"""The additional input of a graph that gathers blocks from the cache, and the rank of this input."""
_KEYS, _VALUES = 0, 1

TypeOf = Callable[[Operand], TensorType | None]


class IntegerCacheRules:
    """Finds errors in the primitives around an int8 KV cache."""

    def __init__(
        self, wiring: Wiring, type_of: TypeOf, shape: ModelShape, cache: PagedAttentionConfig, dtype: str
    ) -> None:
        """``shape`` has the sizes of the agent's part. ``dtype`` is the short name of the activations' type."""
        self._wiring, self._type_of, self._dtype = wiring, type_of, dtype
        self._layers, self._head = shape.num_layers, shape.head_dim
        self._width = shape.num_key_value_heads * shape.head_dim
        heads = (cache.num_blocks, cache.block_size, shape.num_key_value_heads, shape.head_dim)
        row = (cache.num_blocks, cache.block_size, 1, scale_row_width(shape.num_key_value_heads))
        self._gathered = TensorType(dtype, (-1, *heads[1:]))
        self._caches = {
            "key_cache": TensorType("i8", heads),
            "value_cache": TensorType("i8", heads),
            "scale_cache": TensorType(dtype, row),
        }

    def counts(self) -> dict[str, int]:
        """Returns how many more calls of each primitive the graph has than a graph without an int8 cache."""
        return {"ReshapeAndCache": self._layers, "DynamicQuantExt": 2 * self._layers, "Add": self._layers}

    def write_problems(self, node: Node) -> Iterator[str]:
        """Yields the errors of a ReshapeAndCache, which writes either keys and values or their scales to the cache."""
        operands = self._wiring.operands(node)
        caches = {2: "key_cache", 3: "value_cache"} if self._type_of(operands[3]) is not None else {2: "scale_cache"}
        for index, name in caches.items():
            yield from self._cache_problems(node, name, operands[index])
            row = self._type_of(operands[index - 2])
            cache = self._caches[name]
            wanted = TensorType(cache.dtype, (-1, cache.shape[2] * cache.shape[3]))
            if row != wanted:
                yield f"the row of {name} is {row}; it must be {wanted}"
            if name != "scale_cache":
                yield from self._quantised_problems(name, operands[index - 2])
        if self._wiring.source(operands[4])[0].name != "slot_mapping":
            yield "slot_mapping is not the graph's input of that name"

    def read_problems(self, node: Node) -> Iterator[str]:
        """Yields the errors in the keys and values that PagedAttention reads.

        Keys and values must be blocks of the cache, gathered and dequantised.
        """
        operands = self._wiring.operands(node)
        for place, name in ((_KEYS, "key_cache"), (_VALUES, "value_cache")):
            given = self._type_of(operands[1 + place])
            if given != self._gathered:
                yield f"{name} is {given}; the gathered blocks are {self._gathered}"
            yield from self._product_problems(node, operands[1 + place], place, name)

    def prompt_problems(self, node: Node) -> Iterator[str]:
        """Yields an error unless FlashAttentionScore reads quantised and dequantised keys and values.

        Later chunks of a prompt read these rounded values from the cache, so the first chunk must use them as well.
        """
        operands = self._wiring.operands(node)
        for place, name in ((_KEYS, "key"), (_VALUES, "value")):
            yield from self._product_problems(node, operands[1 + place], place, name, gathered=False)

    def _quantised_problems(self, name: str, row: Operand) -> Iterator[str]:
        """Yields an error unless the written row has integers, with a separate scale for each head."""
        node = self._behind(row, "Reshape")
        if node is None or node.primitive != "DynamicQuantExt":
            yield f"the row of {name} is not the result of DynamicQuantExt"
            return
        given = self._type_of(node.operands[0])
        if given != TensorType(self._dtype, (-1, self._head)):
            yield f"DynamicQuantExt reads {given}; a scale for each token and head needs rows of {self._head} elements"

    def _product_problems(
        self, node: Node, operand: Operand, place: int, name: str, *, gathered: bool = True
    ) -> Iterator[str]:
        """Yields an error unless an operand of attention is dequantised correctly.

        The operand must be the product of integers and scales in float32, converted to the model's type.
        """
        cast = self._behind(operand, "Reshape")
        product = None if cast is None or cast.primitive != "Cast" else self._wiring.node_of(cast.operands[0])
        if product is None or product.primitive != "Mul":
            yield f"{name} is not a product of integers and scales"
            return
        if product.results[0].dtype != "f32":
            yield f"{name} is computed in {product.results[0].dtype}; it must be computed in f32 and then rounded once"
        yield from self._scale_problems(product.operands[1], place, name)
        floats = self._wiring.node_of(product.operands[0])
        integers = None if floats is None or floats.primitive != "Cast" else self._behind(floats.operands[0], "Reshape")
        if not gathered:
            if integers is None or integers.primitive != "DynamicQuantExt":
                yield f"{name} does not come from the integers that are written"
        elif integers is None or integers.primitive != "Gather":
            yield f"{name} does not come from a Gather of blocks"
        else:
            yield from self._cache_problems(node, name, integers.operands[0])
            yield from self._order_problems(node, integers.operands[1])

    def _scale_problems(self, scales: Operand, place: int, name: str) -> Iterator[str]:
        """Yields an error unless keys are multiplied by the scales of keys, and values by the scales of values.

        A SplitWithSize divides the scales: its first result belongs to the keys, and its second result to the values.
        ``place`` is 0 for keys and 1 for values.
        """
        source, index = self._wiring.source(self._last_before(scales, "Reshape"))
        split = self._wiring.node_of(source)
        if split is None or split.primitive != "SplitWithSize" or index != place:
            yield f"{name} is not multiplied by the scales of {name}"

    def _order_problems(self, node: Node, blocks: Operand) -> Iterator[str]:
        """Yields an error unless the input ``step_blocks`` selects the gathered blocks.

        The selection must also depend on both cache writes of the layer, so that it does not run before them.
        """
        waits: set[str] = set()
        depend = self._wiring.node_of(blocks)
        while depend is not None and depend.primitive == "Depend":
            write = self._wiring.node_of(depend.operands[1])
            if write is not None and write.primitive == "ReshapeAndCache" and write.layer == node.layer:
                waits.add(write.name)
            blocks = depend.operands[0]
            depend = self._wiring.node_of(blocks)
        if len(waits) < 2:
            yield "the blocks are gathered before both ReshapeAndCache of the layer have written (ops.depend)"
        if self._wiring.source(blocks)[0].name != "step_blocks":
            yield "the gathered blocks are not those of the graph's input step_blocks"

    def _cache_problems(self, node: Node, name: str, operand: Operand) -> Iterator[str]:
        source, _ = self._wiring.source(operand)
        if source.name != f"layers.{node.layer}.attention.{name}":
            yield f"{name} is {source.name or source.kind}, not the {name} of layer {node.layer}"
        if source.type != self._caches[name]:
            yield f"{name} is {source.type}; it must be {self._caches[name]}"

    def _behind(self, operand: Operand, primitive: str) -> Node | None:
        """Returns the node that computes ``operand``, but skips nodes of the type ``primitive``.

        The search continues at the first operand of a skipped node. Returns None if it ends at a parameter, an input
        or a constant.
        """
        return self._wiring.node_of(self._last_before(operand, primitive))

    def _last_before(self, operand: Operand, primitive: str) -> Operand:
        """Returns the operand before all nodes of the type ``primitive``.

        While a node of this type computes the operand, the first operand of the node replaces it. If there is no node
        of this type, the result is ``operand`` itself.
        """
        node = self._wiring.node_of(operand)
        while node is not None and node.primitive == primitive:
            operand = node.operands[0]
            node = self._wiring.node_of(operand)
        return operand
