"""Checks attention with sinks and the clamped SwiGLU of gpt-oss in a graph (``agent.backends.native.sinks``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from llm_serving.config import Config
from llm_serving.model.gpt_oss import SWIGLU_LIMIT, SWIGLU_SLOPE
from llm_serving.model.shape import ModelShape
from tools.ascend_graph.listing import Wiring
from tools.ascend_graph.mind_ir import Node, Operand, TensorType

SINK_PRIMITIVES = frozenset({"FusedInferAttentionScore", "Maximum", "Minimum", "Sigmoid", "Sub"})
"""Primitives that only a model with sinks needs."""
_BSH = 0
"""The value of FusedInferAttentionScore's setting ``input_layout`` that stands for the layout BSH (MindSpore 2.9)."""
_MASK, _LENGTHS, _TABLE = 4, 6, 14
"""Indices of three operands of FusedInferAttentionScore: the mask, the lengths, and the block table."""
_SETTINGS = {"num_heads": 24, "scale_value": 25, "input_layout": 28, "num_key_value_heads": 29, "block_size": 32,
             "softmax_lse_flag": 34}  # fmt: skip
"""For each setting of FusedInferAttentionScore: its index among the operands."""

TypeOf = Callable[[Operand], TensorType | None]


class SinkRules:
    """Finds errors in the primitives of attention with sinks, and of the activation of the experts."""

    def __init__(self, wiring: Wiring, type_of: TypeOf, shape: ModelShape, config: Config, dtype: str) -> None:
        """``shape`` has the sizes of the agent's part. ``dtype`` is the short name of the activations' type."""
        self._wiring, self._type_of, self._shape, self._dtype = wiring, type_of, shape, dtype
        self._cache = config.pa_config
        self._positions = config.max_blocks_per_seq * config.pa_config.block_size
        self._query = shape.num_attention_heads * shape.head_dim
        self._key = shape.num_key_value_heads * shape.head_dim
        self.checks: dict[str, Callable[[Node], Iterator[str]]] = {
            "FusedInferAttentionScore": self._attention_problems,
            "Sigmoid": self._sigmoid_problems,
        }

    def counts(self, *, is_split: bool) -> dict[str, int]:
        """Returns how often each primitive must be in the graph. A layer has a sigmoid for its sinks, and one for its
        experts.

        If agents share the layers (``is_split``), the embedding adds one Maximum, one Minimum and one Sub.
        """
        layers, windows, of_embedding = self._shape.num_layers, int(self._shape.sliding_window > 0), int(is_split)
        counts = dict.fromkeys(("FlashAttentionScore", "PagedAttention", "Swiglu"), 0)
        counts |= dict.fromkeys(("Maximum", "Minimum"), layers + of_embedding)
        counts |= {"FusedInferAttentionScore": layers, "Sigmoid": 2 * layers}
        return counts | {"Sub": layers + windows + of_embedding, "Greater": windows}

    @property
    def num_sums(self) -> int:
        """Number of ``Add`` nodes: each layer has one for the router's bias, and one in the experts' activation."""
        return 2 * self._shape.num_layers

    def _attention_problems(self, node: Node) -> Iterator[str]:
        operands, shape = self._wiring.operands(node), self._shape
        wanted = TensorType(self._dtype, (-1, 1, self._query))
        if self._type_of(operands[0]) != wanted:
            yield f"query is {self._type_of(operands[0])}; it must be {wanted}, one query for each row of the table"
        for place, name in ((1, "key_cache"), (2, "value_cache")):
            yield from self._cache_problems(node, name, operands[place])
        for place, name in ((_LENGTHS, "batch_valid_length"), (_TABLE, "block_tables")):
            if self._wiring.source(operands[place])[0].name != name:
                yield f"argument {place} must be the graph's input {name}"
        values = {
            "num_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.num_key_value_heads,
            "input_layout": _BSH,
            "block_size": self._cache.block_size,
            "softmax_lse_flag": True,
        }
        for name, value in values.items():
            given = operands[_SETTINGS[name]].value
            if given != value:
                yield f"{name} is {given}; it must be {value}"
        scale = operands[_SETTINGS["scale_value"]].value
        if not np.isclose(scale, shape.head_dim**-0.5, rtol=1e-6):
            yield f"scale_value is {scale:.7g}; 1 / sqrt(head size) is {shape.head_dim**-0.5:.7g}"
        yield from self._mask_problems(node, operands[_MASK])
        query = self._wiring.node_of(operands[0])
        if query is None or self._written(node, self._wiring.operands(query)[0]) is None:
            yield "the query does not wait for the layer's ReshapeAndCache (ops.depend)"

    def _cache_problems(self, node: Node, name: str, operand: Operand) -> Iterator[str]:
        """Yields an error unless an operand is the layer's cache after this step's write, with a token's heads in one
        row.
        """
        wanted = TensorType(self._dtype, (self._cache.num_blocks, self._cache.block_size, self._key))
        if self._type_of(operand) != wanted:
            yield f"{name} is {self._type_of(operand)}; it must be {wanted}"
        reshape = self._wiring.node_of(operand)
        read = None if reshape is None else self._wiring.operands(reshape)[0]
        written = None if read is None else self._written(node, read)
        if written is None:
            yield f"the Reshape of {name} does not wait for the layer's ReshapeAndCache (ops.depend)"
        cache = written or read
        source = None if cache is None else self._wiring.source(cache)[0]
        if source is None or source.name != f"layers.{node.layer}.attention.{name}":
            yield f"{name} is {None if source is None else source.name}, not the {name} of layer {node.layer}"

    def _mask_problems(self, node: Node, mask: Operand) -> Iterator[str]:
        """Yields an error if the mask does not fit the layer.

        In a layer with a sliding window, the mask must hide the keys before the window. All other layers have no mask.
        """
        assert node.layer is not None, "each attention belongs to a layer"
        window, greater = self._shape.window_of(node.layer), self._wiring.node_of(mask)
        if not window:
            if greater is not None:
                yield "attn_mask is given; this layer has no window"
            return
        if greater is None or greater.primitive != "Greater":
            yield f"attn_mask is {mask.kind}; it must hide the keys before the window of {window} tokens"
            return
        first, columns = self._wiring.operands(greater)
        reshape = self._wiring.node_of(first)
        before = None if reshape is None else self._wiring.node_of(self._wiring.operands(reshape)[0])
        if before is None or before.primitive != "Sub":
            yield "attn_mask does not compare positions with the beginning of the window"
            return
        positions, size = self._wiring.operands(before)
        if self._wiring.source(positions)[0].name != "positions" or int(size.value) != window - 1:
            yield (
                f"the window begins {size.value} tokens before {self._wiring.source(positions)[0].name}; it must begin "
                f"{window - 1} before positions"
            )
        if columns.value is None or not np.array_equal(columns.value, np.arange(self._positions)[None]):
            yield f"attn_mask does not compare with all positions of the keys, from 0 to {self._positions - 1}"

    def _written(self, node: Node, operand: Operand) -> Operand | None:
        """Returns the value of ``operand`` without the Depend that makes it wait for the layer's write of the cache.

        Returns None if ``operand`` does not wait for the write.
        """
        depend = self._wiring.node_of(operand)
        if depend is None or depend.primitive != "Depend":
            return None
        write = self._wiring.node_of(depend.operands[1])
        is_write = write is not None and write.primitive == "ReshapeAndCache" and write.layer == node.layer
        return depend.operands[0] if is_write else None

    def _sigmoid_problems(self, node: Node) -> Iterator[str]:
        source = self._wiring.node_of(self._wiring.operands(node)[0])
        if source is not None and source.primitive == "Sub":
            yield from self._sink_problems(node, source)
        elif source is not None and source.primitive == "Mul":
            yield from self._gate_problems(node, source)
        else:
            yield "it is the sigmoid of neither a sink nor a gate"

    def _sink_problems(self, node: Node, difference: Node) -> Iterator[str]:
        """Yields an error unless the results of attention are multiplied by sigmoid(softmax_lse - sink)."""
        sums, sinks = map(self._before_reshape, self._wiring.operands(difference))
        attention = self._wiring.node_of(sums)
        if attention is None or attention.primitive != "FusedInferAttentionScore" or self._wiring.source(sums)[1] != 1:
            yield "the sink is not subtracted from softmax_lse, result 1 of FusedInferAttentionScore"
        parameter, heads = self._wiring.source(sinks)[0], self._shape.num_attention_heads
        name, wanted = f"layers.{node.layer}.attention.sinks", TensorType("f32", (heads,))
        if parameter.name != name or parameter.type != wanted:
            computed = self._wiring.node_of(sinks)
            found = f"{parameter.name} {parameter.type}" if computed is None else f"a result of {computed.primitive}"
            yield f"the sinks are {found}; they must be {name} {wanted}"
        shares = TensorType("f32", (-1, heads, 1))
        if node.results != (shares,):
            yield f"the shares are {node.results[0]}; a share for each token and query head is {shares}"
        scaled = self._factors(node)
        found = None if scaled is None else self._behind(scaled, "Cast", "Reshape")
        if found is None or self._wiring.node_of(found) is not attention:
            yield "the result of attention is not multiplied by the shares in float32"

    def _gate_problems(self, node: Node, product: Node) -> Iterator[str]:
        """Yields an error unless the activation is g * sigmoid(1.702 g) * (u + 1), with clamped g and u."""
        gate, slope = self._wiring.operands(product)
        if not _is_number(slope, SWIGLU_SLOPE):
            yield f"the gate is multiplied by {slope.value}; it must be {SWIGLU_SLOPE}"
        split = self._wiring.node_of(gate)
        if split is None or split.primitive != "SplitWithSize" or self._wiring.source(gate)[1] != 0:
            yield "the gate is not the first half of SplitWithSize"
            return
        limit = self._wiring.node_of(self._wiring.operands(split)[0])
        if limit is None or limit.primitive != "Minimum" or not _is_number(limit.operands[1], SWIGLU_LIMIT):
            yield f"gate and up are not limited to {SWIGLU_LIMIT:g}"
        users = [each for each in self._users(node) if each.primitive == "Mul"]
        if len(users) != 1 or self._wiring.source(users[0].operands[0]) != self._wiring.source(gate):
            yield "the gate is not multiplied by its sigmoid"
            return
        up = self._factors(users[0])
        plus_one = None if up is None else self._wiring.node_of(up)
        if plus_one is None or plus_one.primitive != "Add" or not _is_number(plus_one.operands[1], 1.0):
            yield "the gate is not multiplied by up + 1"
            return
        lowest = self._wiring.node_of(plus_one.operands[0])
        if lowest is None or lowest.primitive != "Maximum" or not _is_number(lowest.operands[1], -SWIGLU_LIMIT):
            yield f"up is not limited to {-SWIGLU_LIMIT:g}"
        elif self._wiring.source(lowest.operands[0])[1] != 1:
            yield "up is not the second half of SplitWithSize"

    def _factors(self, node: Node) -> Operand | None:
        """Returns the factor by which the result of a node is multiplied, or None unless exactly one product uses it.
        """
        products = [each for each in self._users(node) if each.primitive == "Mul"]
        if len(products) != 1:
            return None
        others = [each for each in self._wiring.operands(products[0]) if self._wiring.node_of(each) is not node]
        return others[0] if len(others) == 1 else None

    def _users(self, node: Node) -> list[Node]:
        return [
            each
            for each in self._wiring.calls()
            if any(self._wiring.node_of(operand) is node for operand in self._wiring.operands(each))
        ]

    def _before_reshape(self, operand: Operand) -> Operand:
        return self._behind(operand, "Reshape") or operand

    def _behind(self, operand: Operand, *primitives: str) -> Operand | None:
        """Goes back through the nodes that compute ``operand``, and returns the first operand of the last node reached.

        ``primitives`` are the expected primitives of these nodes. Returns None if a node has another primitive.
        """
        for primitive in primitives:
            node = self._wiring.node_of(operand)
            if node is None or node.primitive != primitive:
                return None
            operand = self._wiring.operands(node)[0]
        return operand


def _is_number(operand: Operand, number: float) -> bool:
    return operand.value is not None and bool(np.isclose(float(np.asarray(operand.value).reshape(-1)[0]), number))
