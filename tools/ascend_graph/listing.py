"""Lists a graph as text: one line per primitive, with operands, settings and results. Equal layers are listed once.

Nodes that only order side effects are left out (``Load``, ``UpdateState`` and their tuples). There is one exception:
the listing has the ``Depend`` that makes attention wait for the write of the cache.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tools.ascend_graph.mind_ir import Graph, Node, Operand

STEP, OUTPUT = "step", "output"
"""Names of two sections of a listing: nodes that run once per step for all layers, and nodes after the layers."""


class Wiring:
    """Finds the node, input, parameter or constant that an operand comes from.

    Nodes that only pass a value on are skipped: tuples, loads of parameters, and orderings of side effects.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._nodes = {node.name: node for node in graph.nodes}

    def calls(self) -> Iterator[Node]:
        """Yields the nodes that call a primitive.

        ``Depend`` makes one value wait for another value. A ``Depend`` is yielded only if it waits for the call of a
        primitive.
        """
        for node in self.graph.nodes:
            if node.primitive in ("Load", "UpdateState", "TupleGetItem", "MakeTuple"):
                continue
            if node.primitive != "Depend" or not self._is_state(node.operands[1]):
                yield node

    def source(self, operand: Operand) -> tuple[Operand, int | None]:
        """Returns the value that an operand comes from (see ``Wiring``).

        If this value is one of several results of a node, also returns the index of the result, otherwise None.
        """
        index = None
        while operand.kind == "node":
            node = self._nodes[operand.name]
            if node.primitive == "TupleGetItem":
                index = node.operands[1].value
            elif node.primitive == "MakeTuple" and len(node.operands) == 1:
                index = None
            elif node.primitive != "Load" and not (node.primitive == "Depend" and self._is_state(node.operands[1])):
                break
            operand = node.operands[0]
        return operand, index

    def node_of(self, operand: Operand) -> Node | None:
        """Returns the node that computes an operand, or None for an input, a parameter or a constant."""
        operand, _ = self.source(operand)
        return self._nodes[operand.name] if operand.kind == "node" else None

    def operands(self, node: Node) -> list[Operand]:
        """Returns the operands of a node, without the ``UpdateState`` values that only order side effects.

        If an operand is a tuple of values, as the operand of ``Concat`` is, the list has these values instead.
        """
        given = [each for operand in node.operands for each in self._values(operand)]
        return [each for each in given if not self._is_state(each)]

    def _values(self, operand: Operand) -> Sequence[Operand]:
        node = self._nodes[operand.name] if operand.kind == "node" else None
        return node.operands if node is not None and node.primitive == "MakeTuple" else [operand]

    def _is_state(self, operand: Operand) -> bool:
        return operand.kind == "node" and self._nodes[operand.name].primitive == "UpdateState"


def list_graph(graph: Graph) -> list[str]:
    """Returns the listing of a graph as lines of text."""
    return _Lister(graph).lines()


class _Lister:
    """Creates the listing of one graph. It has a section ``step``, a section for each layer, and a section ``output``.

    Each value has a number within its section, such as ``%3``. Other sections write it with a prefix: ``step%1``,
    ``layer0%7``, or ``before%12`` for a value of the previous layer.
    """

    def __init__(self, graph: Graph) -> None:
        self._wiring = Wiring(graph)
        self._graph = graph
        self._calls = list(self._wiring.calls())
        self._sections = self._find_sections()
        self._numbers: dict[str, int] = {}
        counts: dict[str | int, int] = defaultdict(int)
        for node in self._calls:
            counts[self._sections[node.name]] += 1
            self._numbers[node.name] = counts[self._sections[node.name]]

    def lines(self) -> list[str]:
        lines = ["inputs"]
        lines += [f"  {name} {kind}" for name, kind in self._graph.inputs.items()]
        lines += ["step", *self._section(STEP)]
        layers = sorted({section for section in self._sections.values() if isinstance(section, int)})
        alike: list[tuple[int, int, list[str]]] = []
        for layer in layers:
            text = self._section(layer)
            if alike and alike[-1][2] == text:
                alike[-1] = (alike[-1][0], layer, text)
            else:
                alike.append((layer, layer, text))
        for first, last, text in alike:
            lines += [f"layer {first}" if first == last else f"layers {first} to {last}, each", *text]
        lines += ["output", *self._section(OUTPUT)]
        return [*lines, f"  results {', '.join(map(str, self._graph.outputs))}"]

    def _find_sections(self) -> dict[str, str | int]:
        """Returns the section of each node by the node's name: ``step``, a layer's index, or ``output``.

        A node that depends only on inputs of the graph and constants belongs to ``step``, even if a layer contains it.
        Every other node in a layer belongs to this layer. A node outside the layers belongs to ``output`` if it depends
        on a layer, otherwise to ``step``.
        """
        from_inputs: dict[str, bool] = {}
        behind: dict[str, bool] = {}
        sections: dict[str, str | int] = {}
        for node in self._calls:
            sources = [self._wiring.source(each)[0] for each in self._wiring.operands(node)]
            nodes = [each.name for each in sources if each.kind == "node"]
            from_inputs[node.name] = all(
                each.kind in ("input", "constant") or from_inputs.get(each.name, False) for each in sources
            )
            behind[node.name] = not from_inputs[node.name] and (
                node.layer is not None or any(behind[name] for name in nodes)
            )
            of_layer = node.layer if behind[node.name] and node.layer is not None else None
            sections[node.name] = of_layer if of_layer is not None else OUTPUT if behind[node.name] else STEP
        return sections

    def _section(self, section: str | int) -> list[str]:
        return [self._line(node, section) for node in self._calls if self._sections[node.name] == section]

    def _line(self, node: Node, section: str | int) -> str:
        operands = ", ".join(self._text(each, section) for each in self._wiring.operands(node))
        settings = "".join(f" {name}={_value_text(value)}" for name, value in node.attributes)
        results = _results_text(list(map(str, node.results)))
        return f"  %{self._numbers[node.name]} = {node.primitive}({operands}){settings} -> {results}"

    def _text(self, operand: Operand, section: str | int) -> str:
        operand, index = self._wiring.source(operand)
        if operand.kind == "constant":
            return _value_text(operand.value)
        if operand.kind == "parameter":
            name = operand.name.replace(f"layers.{section}.", "layers.N.")
            return f"{name} {operand.type}"
        if operand.kind == "input":
            return operand.name
        result = "" if index is None else f"[{index}]"
        return f"{self._place(operand.name, section)}%{self._numbers[operand.name]}{result}"

    def _place(self, name: str, section: str | int) -> str:
        """Returns the prefix that names the section of a value, for its use in ``section``. The node ``name`` computes
        the value.

        The prefix is empty if the value belongs to the same section, and ``before`` if it belongs to the previous
        layer.
        """
        where = self._sections[name]
        if where == section:
            return ""
        if isinstance(where, str):
            return where
        if where == section - 1 if isinstance(section, int) else section == OUTPUT:
            return "before"
        return f"layer{where}"


def _results_text(results: list[str]) -> str:
    if len(results) > 4 and len(set(results)) == 1:
        return f"{len(results)} x {results[0]}"
    return ", ".join(results)


def _value_text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return _array_text(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return "(" + ", ".join(map(_value_text, value)) + ")" if isinstance(value, tuple) else str(value)


def _array_text(array: np.ndarray[Any, Any]) -> str:
    """Returns an array as text: the value of a single number, otherwise shape, range and digest of the values."""
    if array.size == 1:
        return f"{array.dtype.name}{list(array.shape)} of {float(array.reshape(-1)[0]):.6g}"
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:12]
    return f"{array.dtype.name}{list(array.shape)} from {array.min():.6g} to {array.max():.6g}, sha256 {digest}"
