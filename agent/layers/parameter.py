"""Parameters whose memory is an array of ours: nothing is copied, so a model takes its weights' memory once."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor
from mindspore.common.initializer import initializer
from mindspore.common.np_dtype import bfloat16
from mindspore.nn.utils import no_init_parameters

from agent.weights.storage import Array

MINDSPORE_DTYPES = {
    "float16": ms.float16,
    "bfloat16": ms.bfloat16,
    "float32": ms.float32,
    "int8": ms.int8,
    "uint8": ms.uint8,
    "int32": ms.int32,
    "int64": ms.int64,
    "int4": ms.qint4x2,
}


def unbound_parameter(shape: tuple[int, ...], dtype: str) -> Parameter:
    """A parameter without memory. Its name comes from its place in the model; ``bind`` gives it its values."""
    with no_init_parameters():
        return Parameter(initializer("zeros", shape, MINDSPORE_DTYPES[dtype]), requires_grad=False)


def bind(parameter: Parameter, array: Array) -> Array:
    """Let ``parameter`` live in ``array`` (see ``agent.weights.storage``), which must stay alive. Gives the array whose
    memory it is: another one for int4 (pairs in the bytes of an int8 array), which MindSpore takes as a copy only.

    Packed weights, uint8, decide their size themselves; before the graph is compiled the parameter takes it over.
    """
    packed = array.dtype == np.uint8
    assert packed or parameter.shape == array.shape, f"{parameter.name}: {parameter.shape} is bound to {array.shape}"
    pairs = parameter.dtype == ms.qint4x2
    tensor = Tensor(array, dtype=ms.qint4x2) if pairs else as_tensor(array)
    parameter.set_data(tensor, slice_shape=packed)
    parameter.init_mode = None
    return np.asarray(_Memory(tensor, array.shape)) if pairs else array


class _Memory:
    """The bytes of a tensor of int4 pairs, which NumPy has no type for. An array over it keeps the tensor alive."""

    def __init__(self, tensor: Tensor, shape: tuple[int, ...]) -> None:
        self.tensor = tensor
        self.__array_interface__ = {"version": 3, "typestr": "|i1", "shape": shape, "data": (tensor.data_ptr(), False)}


def as_tensor(array: Array) -> Tensor:
    """A tensor over the array's memory."""
    return Tensor.from_numpy(array.view(bfloat16) if array.dtype == np.uint16 else array)


def as_storage(tensor: Tensor) -> Array:
    """The tensor's values, waiting for them; bfloat16 as uint16 (``agent.weights.storage``)."""
    array: Array = tensor.asnumpy()
    return array if array.dtype in (np.float32, np.float16) else array.view(np.uint16)
