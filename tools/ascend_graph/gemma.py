"""Checks the parts of Gemma 3 in a graph (``agent.backends.native.gemma``): norms, GeGLU and two rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llm_serving.model.shape import ModelShape
from tools.ascend_graph.listing import Wiring
from tools.ascend_graph.mind_ir import Node, Operand

GEMMA_PRIMITIVES = frozenset({"GeluExt"})
"""Primitives that only Gemma has."""
_TANH = 1
"""The value of GeluExt's setting ``approximate`` that stands for ``tanh`` (MindSpore 2.9)."""


class GemmaRules:
    """Finds norms, gates and rotary tables that do not belong to their place in a layer."""

    def __init__(self, wiring: Wiring, shape: ModelShape) -> None:
        self._wiring, self._shape = wiring, shape
        self.checks: dict[str, Callable[[Node], Iterator[str]]] = {
            "GeluExt": self._gate_problems,
            "RmsNorm": self._norm_problems,
        }

    def counts(self, *, is_last: bool) -> dict[str, int]:
        """Returns how often each primitive must be in the graph. These numbers replace the numbers of a Llama.

        Each layer has norms before attention and MLP, of query and key heads, and of both results.
        """
        layers = self._shape.num_layers
        return {"RmsNorm": 6 * layers + is_last, "AddRmsNorm": 0, "Swiglu": 0, "GeluExt": layers}

    def num_sums(self, *, is_last: bool) -> int:
        """Number of ``Add`` that compute the residual stream. A Llama has ``AddRmsNorm`` in their place."""
        return 2 * self._shape.num_layers - (not is_last)

    def rotary_problems(self, node: Node) -> Iterator[str]:
        """Yields an error unless layers with a window, and only they, use the second rotary embedding."""
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

    def _norm_problems(self, node: Node) -> Iterator[str]:
        """Yields an error unless each norm after attention or MLP reads the result of this attention or MLP."""
        x, gamma = self._wiring.operands(node)[:2]
        name = self._wiring.source(gamma)[0].name
        of_result = {"attention_result_norm": "attention.output.weight", "mlp_result_norm": "mlp.down.weight"}
        for norm, weight in of_result.items():
            if f".{norm}." in name and self._weight_of(x) != f"layers.{node.layer}.{weight}":
                yield f"{name} normalises {self._weight_of(x)}; it must normalise the product with {weight}"

    def _weight_of(self, operand: Operand) -> str | None:
        """Returns the name of the weight whose product is ``operand``. The product may be summed over agents."""
        node = self._wiring.node_of(operand)
        while node is not None and node.primitive == "AllReduce":
            node = self._wiring.node_of(self._wiring.operands(node)[0])
        if node is None:
            return None
        names = [self._wiring.source(each)[0].name for each in self._wiring.operands(node)]
        return next((name for name in names if name.endswith(".weight")), None)
