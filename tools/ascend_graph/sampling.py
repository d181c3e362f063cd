"""Checks the graphs that help to sample on a device (``agent/device_sampling``).

``candidates`` finds the largest logits of each row. ``rows`` copies complete rows of logits. ``draws`` chooses tokens
among the candidates. Only devices that launch steps ahead have the graph ``draws``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from agent.device_sampling.cells import num_candidates
from agent.group.model_part import ModelPart
from agent.run_ahead.draws import DrawColumn
from llm_serving.config import Config
from tools.ascend_graph.listing import Wiring
from tools.ascend_graph.mind_ir import Graph, Node, Operand, TensorType
from tools.ascend_graph.products import TYPES

KINDS = ("candidates", "rows", "draws")
"""Names of the sampling graphs. Only the last stage of a model has them."""
_PRIMITIVES = frozenset({"Cast", "TopkExt", "Gather", "RealDiv", "Sub", "Exp", "ReduceSum"})
_SHARING = frozenset({"AllGather", "SplitWithSize"})
_DRAWS = {
    "Add": 5,
    "ArgMaxWithValue": 1,
    "Equal": 2,
    "Exp": 1,
    "Gather": 1,
    "Greater": 8,
    "RealDiv": 1,
    "ReduceSum": 6,
    "SplitWithSize": 1,
    "Sub": 6,
}
"""The number of calls of each primitive in the graph ``draws``, apart from ``_ANY_NUMBER``."""
_SHARED_DRAWS = {
    "Add": 1,
    "AllGather": 1,
    "Equal": 1,
    "Exp": 1,
    "Gather": 3,
    "RealDiv": 2,
    "ReduceSum": 2,
    "Sub": 1,
    "TopkExt": 1,
    "Transpose": 4,
}
"""Number of additional calls of each primitive, if agents share the vocabulary. These calls join the candidates of all
agents, and choose the first agent's tokens.
"""
_REORDERS = frozenset({"Gather", "Reshape", "TopkExt", "Transpose"})
"""Primitives that select or reorder the elements of their first operand."""
_ANY_NUMBER = frozenset({"Cast", "Mul", "Reshape"})
_VECTOR, _LAST_AXIS = (-1,), -1


def sampling_problems(kind: str, graph: Graph, config: Config) -> Iterator[str]:
    """Yields the errors of a sampling graph, one line each. ``kind`` is one of ``KINDS``.

    If several agents share the last stage, ``graph`` is a graph of the first agent.
    """
    part = ModelPart.of(config)
    vocab_size, columns, dtype = config.shape.vocab_size, part.vocab_stride, TYPES[config.model_config.model_dtype]
    logits, count = TensorType(dtype, (-1, columns)), num_candidates(vocab_size, part)
    if kind == "draws":
        inputs = {"best": TensorType("f32", (-1, count)), "ids": TensorType("i64", (-1, count))}
        inputs |= {"best_ids": TensorType("i32", _VECTOR), "masses": TensorType("f32", _VECTOR)}
        inputs |= {"draws": TensorType("f32", (-1, len(DrawColumn)))}
        outputs: tuple[TensorType, ...] = (TensorType("i32", _VECTOR),)
        calls = dict(Counter(_DRAWS) + Counter(_SHARED_DRAWS)) if part.is_split else _DRAWS
        known = frozenset(calls) | _ANY_NUMBER
    elif kind == "rows":
        inputs, outputs = {"logits": logits, "indices": TensorType("i32", _VECTOR)}, (logits,)
        known, calls = frozenset({"Gather"}), {"Gather": 1}
    else:
        inputs = {"logits": logits, "temperatures": TensorType("f32", (-1, 1))}
        mass = TensorType("f32", _VECTOR)
        outputs = (TensorType("f32", (-1, count)), TensorType("i64", (-1, count)), mass, mass)
        outputs += (logits,) * part.is_split
        known = _PRIMITIVES | (_SHARING if part.is_split else frozenset())
        calls = {"TopkExt": 1, "Exp": 2, "ReduceSum": 2, "RealDiv": 2, "AllGather": 5 * part.is_split}
    wiring = Wiring(graph)
    nodes = list(wiring.calls())
    if graph.inputs != inputs:
        yield f"the inputs are {_types(graph.inputs)}; they must be {_types(inputs)}"
    if graph.outputs != outputs:
        yield f"the graph gives {list(map(str, graph.outputs))}; it must give {list(map(str, outputs))}"
    names = [node.primitive for node in nodes]
    for name in sorted(set(names) - known):
        yield f"the primitive {name} is not one whose kernels are known to be right on an Ascend"
    for name, number in calls.items():
        if names.count(name) != number:
            yield f"{names.count(name)} x {name}; there should be {number}"
    for node in nodes:
        if node.primitive == "TopkExt":
            yield from _top_k_problems(node, wiring, count)
    if kind == "draws":
        yield from _draw_problems(nodes, wiring, is_split=part.is_split)


def _draw_problems(nodes: list[Node], wiring: Wiring, *, is_split: bool) -> Iterator[str]:
    """Yields an error for each fault in the graph ``draws``.

    The graph must divide the logits by the temperature. The result must be the sum of ``best_ids`` and a difference,
    which is 0 for greedy sequences. Without this sum, greedy sequences would get drawn tokens. If agents share the
    vocabulary, the graph gathers the sums of all agents, and the result is one agent's part.
    """
    for node in nodes:
        if node.primitive == "RealDiv":
            logits, divisor = (wiring.source(operand) for operand in wiring.operands(node))
            if _origin(logits[0], wiring).name != "best" or divisor[1] != DrawColumn.TEMPERATURE:
                yield "RealDiv does not divide the candidates' logits by the temperature"
        if node.primitive == "ArgMaxWithValue":
            source = wiring.node_of(wiring.operands(node)[0])
            if source is None or source.primitive != "Mul":
                yield "ArgMaxWithValue does not read the product of token ids and the chosen rank"
    last: Node | None = nodes[-1]
    if is_split and last is not None:
        gathering = wiring.node_of(_origin(wiring.operands(last)[0], wiring))
        last = None if gathering is None else wiring.node_of(wiring.operands(gathering)[0])
        if gathering is None or gathering.primitive != "AllGather":
            yield "the result is not a part of the gathered tokens of all agents"
    if last is None or last.primitive != "Add" or wiring.source(wiring.operands(last)[0])[0].name != "best_ids":
        yield "the result is not best_ids plus the difference of the drawn tokens"


def _origin(operand: Operand, wiring: Wiring) -> Operand:
    """Returns the value whose elements an operand has, perhaps in another order (``_REORDERS``)."""
    operand = wiring.source(operand)[0]
    while (node := wiring.node_of(operand)) is not None and node.primitive in _REORDERS:
        operand = wiring.source(wiring.operands(node)[0])[0]
    return operand


def _top_k_problems(node: Node, wiring: Wiring, count: int) -> Iterator[str]:
    """Yields the errors of a TopkExt. The order of equal values does not matter, because the host sorts candidates of
    equal logits itself.
    """
    values, *settings = wiring.operands(node)
    wanted = [count, _LAST_AXIS, True, True]
    found = [operand.value for operand in settings]
    if found != wanted:
        yield f"k, dim, largest and sorted of TopkExt are {found}; they must be {wanted}"
    source = wiring.node_of(values)
    if source is None or source.results[0].dtype != "f32":
        yield "TopkExt does not read the logits in float32"


def _types(inputs: dict[str, TensorType]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in inputs.items())
