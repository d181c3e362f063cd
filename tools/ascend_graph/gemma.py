"""Checks the parts of Gemma 3 in a graph (``agent.backends.native.gemma``).

These are the norms, the sums of the residual stream, GeGLU, and two rotary embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llm_serving.model.shape import ModelShape
from tools.ascend_graph.listing import Wiring
from tools.ascend_graph.mind_ir import Node, Operand, TensorType

GEMMA_PRIMITIVES = frozenset({"GeluExt"})
"""Primitives that only Gemma has."""
_TANH = 1
"""The value of GeluExt's setting ``approximate`` that stands for ``tanh`` (MindSpore 2.9)."""


class GemmaRules:
    """Finds norms, sums, gates and rotary tables in the wrong place in a layer."""

    def __init__(self, wiring: Wiring, shape: ModelShape, dtype: str) -> None:
        """``dtype`` is the short name of the activations' type."""
        self._wiring, self._shape = wiring, shape
        self._stream = TensorType(dtype, (-1, shape.hidden_size))
        self.checks: dict[str, Callable[[Node], Iterator[str]]] = {
            "Add": self._sum_problems,
            "GeluExt": self._gate_problems,
            "Mul": self._product_problems,
        }

    def counts(self, *, is_last: bool) -> dict[str, int]:
        """Returns how often each primitive must be in the graph. These numbers replace the numbers of a Llama.

        Each layer has six norms. One is before attention, and one before the MLP. Query heads, key heads, the result of
        attention and the result of the MLP also have a norm each.
        """
        layers = self._shape.num_layers
        return {"RmsNorm": 6 * layers + is_last, "AddRmsNorm": 0, "Swiglu": 0, "GeluExt": layers}

    def num_sums(self, *, is_last: bool) -> int:
        """Returns the number of ``Add`` nodes in the residual stream. A Llama has ``AddRmsNorm`` there instead."""
        return 2 * self._shape.num_layers - (not is_last)

    def rotary_problems(self, node: Node) -> Iterator[str]:
        """Yields an error if a layer uses the wrong one of the model's two rotary embeddings.

        Layers with a sliding window use the local rotary embedding, and all other layers use the global one.
        """
        assert node.layer is not None, "each rotary embedding belongs to a layer"
        wanted = "local_rotary." if self._shape.is_local(node.layer) else "rotary."
        for operand in self._wiring.operands(node)[2:4]:
            gather = self._wiring.node_of(operand)
            table = None if gather is None else self._wiring.source(self._wiring.operands(gather)[0])[0]
            if table is None or not table.name.startswith(wanted):
                yield f"the table is {None if table is None else table.name}; it must be one of {wanted}"

    def _gate_problems(self, node: Node) -> Iterator[str]:
        gate, approximate = self._wiring.operands(node)[:2]
        if approximate.value != _TANH:
            yield f"approximate is {approximate.value}; the model's GELU has the form with tanh, {_TANH}"
        _, half = self._wiring.source(gate)
        if half != 0:
            yield f"the gate is result {half} of SplitWithSize; it must be the first half"

    def _product_problems(self, node: Node) -> Iterator[str]:
        """Yields an error unless a product with a GELU multiplies the GELU of one half of a row by the other half."""
        factors = self._wiring.operands(node)
        nodes = [node for node in map(self._wiring.node_of, factors) if node is not None]
        gelus = [each for each in nodes if each.primitive == "GeluExt"]
        if not gelus:
            return
        split, _ = self._wiring.source(self._wiring.operands(gelus[0])[0])
        if self._wiring.node_of(factors[0]) is not gelus[0] or self._wiring.source(factors[1]) != (split, 1):
            yield "the factors are not the GELU of a gate and result 1 of the SplitWithSize that the gate comes from"

    def norm_problems(self, node: Node) -> Iterator[str]:
        """Yields an error unless the norm reads the value that the norm with this name must normalise."""
        x, gamma = self._wiring.operands(node)[:2]
        name = self._wiring.source(gamma)[0].name
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        of_result = {"attention_result_norm": "attention.output.weight", "mlp_result_norm": "mlp.down.weight"}
        of_heads = {"query_norm": 0, "key_norm": 1}
        if norm in of_result:
            wanted, found = f"{layer}.{of_result[norm]}", self._weight_of(x)
            if found != wanted or layer != f"layers.{node.layer}":
                yield f"{name} normalises {found}; it must normalise the product with {of_result[norm]}"
        elif norm in of_heads:
            half = self._half_of(x)
            if half != of_heads[norm]:
                yield f"{name} normalises result {half} of SplitWithSize; it must be result {of_heads[norm]}"
        else:
            wanted, found = self._stream_before(layer, norm), self._part_of_stream(x)
            if found != wanted:
                yield f"{name} normalises {found}; it must normalise {wanted}"

    def _sum_problems(self, node: Node) -> Iterator[str]:
        """Yields an error unless a sum of the residual stream adds a normalised result to the right part of the stream.

        The right part is the one that attention or the MLP has read to compute this result.
        """
        if node.results != (self._stream,) or self._adds_adapter(node):
            return
        result, stream = map(self._part_of_stream, self._wiring.operands(node))
        layer, _, norm = (result or "").rpartition(".")
        before = {"attention_result_norm": "input_norm", "mlp_result_norm": "post_attention_norm"}
        if norm not in before:
            yield f"the sum adds {result}; it must add the norm of a result to the stream"
        elif stream != (wanted := self._stream_before(layer, before[norm])):
            yield f"the sum adds {result} to {stream}; it must add to {wanted}"

    def _stream_before(self, layer: str, norm: str) -> str:
        """Returns the part of the residual stream that the norm ``norm`` of ``layer`` must read.

        The result is "the embedding", or "the sum with NAME". NAME is the norm whose result was added last.
        """
        if norm == "post_attention_norm":
            return f"the sum with {layer}.attention_result_norm"
        number = self._shape.num_layers if norm == "norm" else int(layer.removeprefix("layers."))
        return f"the sum with layers.{number - 1}.mlp_result_norm" if number else "the embedding"

    def _part_of_stream(self, operand: Operand) -> str | None:
        """Returns a text that names ``operand`` as a part of the residual stream. None if it is not a part.

        The text is "the embedding", the name of a norm for its result, or "the sum with NAME". In the sum, the result
        of the norm NAME is added to the stream. An operand with only the rows of the last tokens also counts.
        """
        node = self._wiring.node_of(operand)
        while node is not None and node.primitive in ("AllReduce", "Gather", "Mul"):
            first = self._wiring.operands(node)[0]
            if self._wiring.source(first)[0].name == "embedding.weight":
                return "the embedding"
            node = self._wiring.node_of(first)
        if node is None:
            return None
        if node.primitive == "RmsNorm":
            return self._wiring.source(self._wiring.operands(node)[1])[0].name.removesuffix(".weight")
        if node.primitive == "Add":
            return f"the sum with {self._part_of_stream(self._wiring.operands(node)[0])}"
        return None

    def _half_of(self, operand: Operand) -> int | None:
        """Returns the index of an operand among the results of SplitWithSize, or None if it is not one of them.

        A Reshape after the SplitWithSize is skipped.
        """
        node = self._wiring.node_of(operand)
        while node is not None and node.primitive == "Reshape":
            operand = self._wiring.operands(node)[0]
            node = self._wiring.node_of(operand)
        is_split = node is not None and node.primitive == "SplitWithSize"
        return self._wiring.source(operand)[1] if is_split else None

    def _weight_of(self, operand: Operand) -> str | None:
        """Returns the name of the weight whose product is ``operand``. None if there is no weight.

        The product may be summed over agents, and the result of an adapter may be added to it.
        """
        node = self._wiring.node_of(operand)
        while node is not None and (node.primitive == "AllReduce" or self._adds_adapter(node)):
            node = self._wiring.node_of(self._wiring.operands(node)[0])
        if node is None:
            return None
        names = [self._wiring.source(each)[0].name for each in self._wiring.operands(node)]
        return next((name for name in names if name.endswith(".weight")), None)

    def _adds_adapter(self, node: Node) -> bool:
        """Returns True if a node adds an adapter's result to a product. ``AdapterRules`` checks these sums."""
        added = self._wiring.node_of(self._wiring.operands(node)[-1]) if node.primitive == "Add" else None
        return added is not None and added.primitive == "GroupedMatmulV4"
