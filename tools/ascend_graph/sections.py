"""Checks the rotary embedding in a graph whose positions have three dimensions (``agent.backends.native.sections``)."""

from __future__ import annotations

from collections.abc import Iterator

from llm_serving.model.shape import ModelShape
from tools.ascend_graph.listing import Wiring
from tools.ascend_graph.mind_ir import Node, Operand, TensorType

SECTION_PRIMITIVES = frozenset({"Concat"})
"""Primitives that a graph has only if its positions have three dimensions."""
POSITIONS = TensorType("i32", (4, -1))
"""The graph's input ``positions``: the position in the sequence, then time, row and column."""


class SectionRules:
    """Finds tables, masks and rows of positions that do not belong together."""

    def __init__(self, wiring: Wiring, shape: ModelShape) -> None:
        self._wiring, self._sections = wiring, shape.rotary_sections

    def rotary_problems(self, node: Node) -> Iterator[str]:
        """Yields an error unless each section of cos and sin comes from its own dimension of the positions."""
        for name, operand in zip(("cos", "sin"), self._wiring.operands(node)[2:4], strict=True):
            join = self._wiring.node_of(operand)
            parts = [] if join is None or join.primitive != "Concat" else self._wiring.operands(join)[:-1]
            found = [self._section(part) for part in parts]
            wanted = [(width, 1 + dimension) for dimension, width in enumerate(self._sections)] * 2
            if found != wanted:
                yield f"{name} has sections of (width, row of positions) {found}; the model's are {wanted}"

    def mask_problems(self, node: Node) -> Iterator[str]:
        """Yields an error unless the mask is made from row 0 of ``positions``: the tokens' positions in their
        sequences.
        """
        row = self._row(self._wiring.operands(node)[1])
        if row != 0:
            yield f"the mask reads row {row} of positions; positions in sequences are row 0"

    def _section(self, operand: Operand) -> tuple[int, int | None]:
        """Returns the width of a section of cos or sin, and the index of the row of ``positions`` that it belongs to.

        A Gather looks the section up in a table, at the positions in this row. Returns (0, None) if no Gather computes
        the section. The index is None if the Gather takes its positions from elsewhere.
        """
        gather = self._wiring.node_of(operand)
        if gather is None or gather.primitive != "Gather":
            return 0, None
        return gather.results[0].shape[-1], self._row(self._wiring.operands(gather)[1])

    def _row(self, operand: Operand) -> int | None:
        """Returns the row of the input ``positions`` that an operand comes from, or None."""
        node = self._wiring.node_of(operand)
        while node is not None and node.primitive == "Reshape":
            node = self._wiring.node_of(self._wiring.operands(node)[0])
        if node is None or node.primitive != "Gather":
            return None
        table, index, *_ = self._wiring.operands(node)
        source, _ = self._wiring.source(table)
        if source.name != "positions" or index.kind != "constant":
            return None
        return int(index.value.reshape(-1)[0])
