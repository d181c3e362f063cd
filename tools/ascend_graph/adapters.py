"""Checks the LoRA adapters in a graph: grouped matrix products with stacked matrices, added to each linear layer.

``agent.lora.stacked`` describes the matrices. docs/ascend.md names the sources of the rules of GroupedMatmulV4.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from agent.lora.stacked import A_NAME, B_NAME, StackedSizes
from llm_serving.model.shape import ModelShape
from tools.ascend_graph.listing import Wiring
from tools.ascend_graph.mind_ir import Node, Operand, TensorType
from tools.ascend_graph.products import PRODUCTS

ADAPTER_PRIMITIVES = frozenset({"GroupedMatmulV4"})
ROWS = "adapter_rows"
_GROUP_LIST, _FIRST_SETTING = 8, 12
_SETTINGS = (3, 0, 1, 0)
"""The required ``split_item``, ``group_type``, ``group_list_type`` and ``act_type`` of every grouped product."""
_QUANTISERS = ("DynamicQuantExt", "QuantV2")


class AdapterRules:
    """Finds errors in the grouped matrix products of adapters, and in the sums that add them to the layers' outputs."""

    def __init__(self, wiring: Wiring, sizes: StackedSizes, shape: ModelShape, dtype: str) -> None:
        """``shape`` has the sizes of the agent's part of the model. ``dtype`` is the type of the activations."""
        self._wiring, self._sizes, self._shape, self._dtype = wiring, sizes, shape, dtype
        calls = list(wiring.calls())
        self._base = {self._weight(node): node for node in calls if node.primitive in PRODUCTS}
        """The product of each linear layer, by the name of its weight."""
        self._users: dict[str, list[Node]] = defaultdict(list)
        """For each node, by name: the nodes that read its results. A node that reads them twice occurs twice."""
        for node in calls:
            for name in self._operand_nodes(node):
                self._users[name].append(node)

    @property
    def inputs(self) -> dict[str, TensorType]:
        """Name and type of the graph's input for adapters, which has the number of rows of each adapter slot."""
        return {ROWS: TensorType("i64", (self._sizes.num_groups,))}

    @property
    def num_layers(self) -> int:
        """The number of linear layers with adapters: two of each attention and two of each MLP without experts."""
        shape = self._shape
        return sum(2 if shape.has_experts(layer) else 4 for layer in range(shape.num_layers))

    def counts(self) -> dict[str, int]:
        """Returns how many calls of each primitive the adapters add to the graph."""
        return {"GroupedMatmulV4": 2 * self.num_layers, "Add": self.num_layers}

    def is_adapter(self, node: Node) -> bool:
        return node.primitive == "GroupedMatmulV4" and self._weight(node).endswith((A_NAME, B_NAME))

    def problems(self, node: Node) -> Iterator[str]:
        """Yields the errors of an adapter's grouped product, which multiplies by matrix A or by matrix B."""
        operands = self._wiring.operands(node)
        settings = tuple(operand.value for operand in operands[_FIRST_SETTING : _FIRST_SETTING + len(_SETTINGS)])
        if settings != _SETTINGS:
            yield f"split_item, group_type, group_list_type and act_type are {settings}; they must be {_SETTINGS}"
        for index, operand in enumerate(operands[2:_FIRST_SETTING], 2):
            if index != _GROUP_LIST and (operand.kind != "constant" or operand.value is not None):
                yield f"argument {index} is given; it must be None, because an adapter has no scales and no bias"
        rows, _ = self._wiring.source(operands[_GROUP_LIST])
        if (rows.kind, rows.name) != ("input", ROWS):
            yield f"group_list is {rows.name or rows.kind}, not the graph's input {ROWS}"
        layer, _, matrix = self._weight(node).rpartition(".")
        base = self._base.get(f"{layer}.weight")
        if base is None or not layer.startswith(f"layers.{node.layer}."):
            yield f"{layer} is not a linear layer of decoder layer {node.layer}"
            return
        yield from self._shape_problems(node, base, matrix)
        yield from self._shrink_problems(node, base) if matrix == A_NAME else self._sum_problems(node, layer, base)

    def _shape_problems(self, node: Node, base: Node, matrix: str) -> Iterator[str]:
        """Yields an error unless the matrix (A or B) fits the layer's inputs and outputs and the adapters' ranks."""
        layers = {"qkv": 3, "gate_up": 2, "joined": 2}.get(self._weight(node).split(".")[-2], 1)
        width = base.results[0].shape[-1]
        a, b = self._sizes.shapes(self._width(self._input(base)), width, layers)
        given, _ = self._wiring.source(self._wiring.operands(node)[1])
        wanted = TensorType(self._dtype, a if matrix == A_NAME else b)
        if given.type != wanted:
            yield f"{matrix} is {given.type}; it must be {wanted}"

    def _shrink_problems(self, node: Node, base: Node) -> Iterator[str]:
        x, wanted = self._wiring.source(self._wiring.operands(node)[0]), self._wiring.source(self._input(base))
        if (x[0].name, x[1] or 0) != (wanted[0].name, wanted[1] or 0):
            yield "the product with A does not take the input of the linear layer"

    def _sum_problems(self, node: Node, layer: str, base: Node) -> Iterator[str]:
        """Yields an error unless the adapter's output is computed and added correctly.

        An adapter multiplies its input by the matrix A and the result by the matrix B. ``node`` is the product with B.
        Its result must be added to the layer's output, and the rest of the graph must use only this sum.
        """
        before = self._wiring.node_of(self._wiring.operands(node)[0])
        if before is None or not self.is_adapter(before) or self._weight(before) != f"{layer}.{A_NAME}":
            yield f"the product with B does not take the result of the product with {layer}.{A_NAME}"
        sums = self._users[node.name]
        if len(sums) != 1 or sums[0].primitive != "Add":
            yield "the result must be used once, in the sum with the linear layer's output"
            return
        [other] = [name for name in self._operand_nodes(sums[0]) if name != node.name] or [""]
        if other != base.name and other not in self._biased(base):
            yield "the result is not added to the linear layer's output"
        elif len(self._users[other]) != 1:
            yield "the linear layer's output is also used without the adapter's result"

    def _biased(self, base: Node) -> set[str]:
        """Returns the names of the nodes that add a bias to the output of a layer's product."""
        return {
            each.name
            for each in self._users[base.name]
            if each.primitive == "Add"
            and any(self._wiring.source(operand)[0].kind == "parameter" for operand in self._wiring.operands(each))
        }

    def _input(self, base: Node) -> Operand:
        """Returns the activations that a layer multiplies, before they are quantised."""
        x = self._wiring.operands(base)[0]
        quantised = self._wiring.node_of(x)
        is_quantised = quantised is not None and quantised.primitive in _QUANTISERS
        return self._wiring.operands(quantised)[0] if quantised is not None and is_quantised else x

    def _width(self, operand: Operand) -> int:
        source, index = self._wiring.source(operand)
        node = self._wiring.node_of(source)
        assert node is not None, "the input of a layer is the result of a node"
        width: int = node.results[index or 0].shape[-1]
        return width

    def _weight(self, node: Node) -> str:
        return self._wiring.source(self._wiring.operands(node)[1])[0].name

    def _operand_nodes(self, node: Node) -> list[str]:
        return [name for operand in self._wiring.operands(node) for name in self._node_name(operand)]

    def _node_name(self, operand: Operand) -> Iterator[str]:
        source, _ = self._wiring.source(operand)
        if source.kind == "node":
            yield source.name
