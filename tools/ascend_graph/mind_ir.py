"""Reads a compiled graph from the MindIR of MindSpore's front end.

MindIR is a protocol buffer (``mindspore.train.mind_ir_pb2``). A node names its primitive in ``op_type``
(``REF::RmsNorm:4``). Its operands are the names of other nodes, inputs or parameters. Settings such as ``head_num`` are
constant operands. The attribute ``shape`` has the types and shapes of the results.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

_DTYPES = {1: "f32", 2: "u8", 3: "i8", 5: "i16", 6: "i32", 7: "i64", 9: "bool", 10: "f16", 16: "bf16", 18: "i4"}
"""Short names of element types, by their number in MindIR (``TensorProto.DataType``)."""
_NUMPY_DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64}
_LAYER = re.compile(r"/layers-CellList/(\d+)-")


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type and shape of a tensor. A size of -1 means that the size differs between steps."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand: another ``node``, an ``input`` or ``parameter`` of the graph by its name, or a ``constant``."""

    kind: str
    name: str = ""
    value: Any = None
    type: TensorType | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a graph: the call of a primitive, with its operands and results."""

    name: str
    primitive: str
    operands: tuple[Operand, ...]
    results: tuple[TensorType, ...]
    attributes: tuple[tuple[str, Any], ...]
    """The primitive's attributes by name, without the internal attributes of MindSpore."""
    scope: str
    """Place in the model, such as ``Default/model-Llama/layers-CellList/0-DecoderLayer/...``."""

    @property
    def layer(self) -> int | None:
        """Index of the decoder layer, or None."""
        match = _LAYER.search(self.scope)
        return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Graph:
    """A compiled graph. In ``nodes``, a node is after its operands. ``outputs`` has the types of the outputs."""

    inputs: dict[str, TensorType]
    parameters: dict[str, TensorType]
    nodes: tuple[Node, ...]
    outputs: tuple[TensorType, ...]


_PRIVATE_ATTRIBUTES = frozenset({"input_names", "output_names", "side_effect_propagate", "side_effect_mem"})


def read_graph(model_proto: bytes) -> Graph:
    """Reads a graph from the bytes of a MindIR file. Raises ValueError if the graph calls other graphs."""
    from mindspore.train.mind_ir_pb2 import ModelProto

    model = ModelProto()
    model.ParseFromString(model_proto)
    if len(model.functions):
        raise ValueError(f"the graph calls {len(model.functions)} others, but it must be flat")
    return _Reader(model).graph


class _Reader:
    """Converts a graph from the protocol buffer of a MindIR file to a ``Graph``."""

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
    """Returns the value of an attribute: a Python value, or an array for a tensor (float32 for bfloat16).

    For a state of side effects, the value is None. MindIR stores a single number in the field ``i``, ``f`` or ``d``. It
    stores a number within a tuple in the list ``ints``, ``floats`` or ``doubles``, as the only element.
    """
    kind = attribute.AttributeType.Name(attribute.type)
    if kind in ("TUPLE", "LIST"):
        return tuple(_value(each) for each in attribute.values)
    if kind == "TENSORS":
        return _array(attribute.tensors[0])
    if kind == "STRING":
        return attribute.s.decode() or (attribute.strings[0].decode() if attribute.strings else "")
    if kind in ("FLOAT", "DOUBLE"):
        return attribute.f or attribute.d or next(iter((*attribute.floats, *attribute.doubles)), 0.0)
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
    """Returns the types in the attribute ``shape``: one tensor, or a tuple of tensors."""
    if attribute.values:
        return [result for each in attribute.values for result in _tensor_types(each)]
    return [_tensor_type(each) for each in attribute.tensors]


def _tensor_type(proto: Any) -> TensorType:
    return TensorType(_DTYPES.get(proto.data_type, f"type{proto.data_type}"), tuple(proto.dims))


def _plain(name: str) -> str:
    """Returns the name of a graph's input without the graph's name."""
    return name.rsplit(":", 1)[-1]
