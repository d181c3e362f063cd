"""A compiled graph, read from the MindIR that MindSpore's front end makes of it.

MindIR is a protocol buffer (``mindspore.train.mind_ir_pb2``). A node names its primitive in ``op_type``
(``REF::RmsNorm:4``), its operands by the names of other nodes, of the graph's inputs or of its parameters; settings
such as ``head_num`` are operands too, constant ones. The attribute ``shape`` holds types and shapes of its results.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

_DTYPES = {1: "f32", 2: "u8", 3: "i8", 5: "i16", 6: "i32", 7: "i64", 9: "bool", 10: "f16", 16: "bf16", 18: "i4"}
"""``TensorProto.DataType`` of MindIR."""
_NUMPY_DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64}
_LAYER = re.compile(r"/layers-CellList/(\d+)-")


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type and shape; -1 is a size that changes from step to step."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Operand:
    """What a node reads: another ``node``, an ``input`` or ``parameter`` of the graph by name, or a ``constant``."""

    kind: str
    name: str = ""
    value: Any = None
    type: TensorType | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A call of a primitive."""

    name: str
    primitive: str
    operands: tuple[Operand, ...]
    results: tuple[TensorType, ...]
    attributes: tuple[tuple[str, Any], ...]
    """Of the primitive, by name; what MindSpore notes for itself left out."""
    scope: str
    """Where in the model, as in ``Default/model-Llama/layers-CellList/0-DecoderLayer/...``."""

    @property
    def layer(self) -> int | None:
        """Which decoder layer it belongs to."""
        match = _LAYER.search(self.scope)
        return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Graph:
    """Inputs and nodes, each node after its operands; ``outputs`` are types."""

    inputs: dict[str, TensorType]
    parameters: dict[str, TensorType]
    nodes: tuple[Node, ...]
    outputs: tuple[TensorType, ...]


_PRIVATE_ATTRIBUTES = frozenset({"input_names", "output_names", "side_effect_propagate", "side_effect_mem"})


def read_graph(model_proto: bytes) -> Graph:
    """Raises ValueError when the graph calls others: the models' graphs are flat, and a listing relies on it."""
    from mindspore.train.mind_ir_pb2 import ModelProto

    model = ModelProto()
    model.ParseFromString(model_proto)
    if len(model.functions):
        raise ValueError(f"the graph calls {len(model.functions)} others; a flat one is expected")
    return _Reader(model).graph


class _Reader:
    """One reading."""

    def __init__(self, model: Any) -> None:
        self._proto = model.graph
        self._primitives = {each.name: each for each in model.primitives}
        self._inputs = {each.name: _plain(each.name) for each in self._proto.input}
        self._parameters = {each.name: each for each in self._proto.parameter}
        self._constants = {each.output[0]: each for each in self._proto.node if each.op_type == "Constant"}

    @cached_property
    def graph(self) -> Graph:
        inputs = {_plain(each.name): _tensor_type(each.tensor[0]) for each in self._proto.input}
        parameters = {_plain(name): _tensor_type(each) for name, each in self._parameters.items()}
        nodes = tuple(self._node(each) for each in self._proto.node if each.op_type != "Constant")
        results = {node.name: node.results for node in nodes}
        outputs = tuple(result for each in self._proto.output for result in results[each.name])
        return Graph(inputs, parameters, nodes, outputs)

    def _node(self, proto: Any) -> Node:
        key = proto.op_type.removeprefix("REF::")
        primitive = self._primitives[key]
        attributes = {each.name: each for each in primitive.attribute if each.name not in _PRIVATE_ATTRIBUTES}
        return Node(
            name=proto.output[0],
            primitive=primitive.op_type,
            operands=tuple(self._operand(name) for name in proto.input),
            results=tuple(result for each in proto.attribute if each.name == "shape" for result in _tensor_types(each)),
            attributes=tuple(sorted((name, _value(each)) for name, each in attributes.items())),
            scope=proto.domain,
        )

    def _operand(self, name: str) -> Operand:
        if name in self._inputs:
            return Operand("input", self._inputs[name])
        if name in self._parameters:
            return Operand("parameter", _plain(name), type=_tensor_type(self._parameters[name]))
        if name in self._constants:
            return _constant(self._constants[name])
        return Operand("node", name)


def _constant(proto: Any) -> Operand:
    (attribute,) = [each for each in proto.attribute if each.name == "value"] or [proto.attribute[0]]
    value = _value(attribute)
    if isinstance(value, np.ndarray):
        return Operand("constant", value=value, type=_tensor_type(attribute.tensors[0]))
    return Operand("constant", value=value)


def _value(attribute: Any) -> Any:
    """A Python value or, of a tensor, an array (bfloat16 as float32). A state of side effects, which orders them and
    holds nothing, is None. Numbers stand in a field of their own, or in a list of one inside a tuple."""
    kind = attribute.AttributeType.Name(attribute.type)
    if kind in ("TUPLE", "LIST"):
        return tuple(_value(each) for each in attribute.values)
    if kind == "TENSORS":
        return _array(attribute.tensors[0])
    if kind == "STRING":
        return attribute.s.decode() or (attribute.strings[0].decode() if attribute.strings else "")
    if kind in ("FLOAT", "DOUBLE"):
        return attribute.f or attribute.d or next((*attribute.floats, *attribute.doubles), 0.0)
    if kind == "BOOL":
        return bool(attribute.i)
    if kind.startswith(("INT", "UINT")):
        return int(attribute.i or next(iter(attribute.ints), 0))
    if kind in ("NONE", "UMONAD", "IOMONAD", "TYPE_NULL"):
        return None
    return f"{kind} {attribute.i}"


def _array(proto: Any) -> npt.NDArray[Any]:
    dtype, shape = _DTYPES[proto.data_type], tuple(proto.dims)
    if dtype == "bf16":
        bits = np.frombuffer(proto.raw_data, np.uint16).astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32).reshape(shape)
    return np.frombuffer(proto.raw_data, _NUMPY_DTYPES[dtype]).reshape(shape)


def _tensor_types(attribute: Any) -> list[TensorType]:
    """Of the attribute ``shape``: a tensor, or a tuple of them."""
    if attribute.values:
        return [result for each in attribute.values for result in _tensor_types(each)]
    return [_tensor_type(each) for each in attribute.tensors]


def _tensor_type(proto: Any) -> TensorType:
    return TensorType(_DTYPES.get(proto.data_type, f"type{proto.data_type}"), tuple(proto.dims))


def _plain(name: str) -> str:
    """A graph's input without the graph's own name before it."""
    return name.rsplit(":", 1)[-1]
