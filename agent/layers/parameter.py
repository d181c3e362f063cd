"""Makes MindSpore Parameters that use the memory of NumPy arrays. So the loaded weights are in memory only once."""

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
    """Makes a Parameter that has no memory until ``bind`` is called. MindSpore names it after its place in the model.
    """
    with no_init_parameters():
        return Parameter(initializer("zeros", shape, MINDSPORE_DTYPES[dtype]), requires_grad=False)


def bind(parameter: Parameter, array: Array) -> Array:
    """Makes ``parameter`` use the memory of ``array``. Call this before the graph is compiled.

    Returns the array whose memory the parameter uses. The caller must keep it alive. Usually this is ``array`` itself.
    MindSpore copies int4 arrays (two values in each byte). Then the result is the copy. A parameter of packed weights
    (uint8) gets the size of the array.
    """
    packed = array.dtype == np.uint8
    assert packed or parameter.shape == array.shape, (
        f"{parameter.name} has shape {parameter.shape}, its array {array.shape}"
    )
    pairs = parameter.dtype == ms.qint4x2
    tensor = Tensor(array, dtype=ms.qint4x2) if pairs else as_tensor(array)
    parameter.set_data(tensor, slice_shape=packed)
    parameter.init_mode = None
    return np.asarray(_Memory(tensor, array.shape)) if pairs else array


def move_to_device(parameter: Parameter, array: Array, device: str) -> None:
    """Copies ``array`` to the memory of a device, as the value of ``parameter``.

    ``device`` is MindSpore's name of the device, for example ``Ascend``. Call this before the graph is compiled. The
    caller may free the array afterwards.
    """
    packed = array.dtype == np.uint8
    tensor = Tensor(array, dtype=ms.qint4x2) if parameter.dtype == ms.qint4x2 else as_tensor(array)
    parameter.set_data(tensor.move_to(device), slice_shape=packed)
    parameter.init_mode = None


def create_on_device(parameter: Parameter) -> None:
    """Allocates ``parameter`` in the memory of the current device and fills it with zeros, without a copy in host
    memory.
    """
    parameter.set_data(ms.ops.zeros(parameter.shape, parameter.dtype))
    parameter.init_mode = None


class _Memory:
    """Gives NumPy access to the bytes of an int4 tensor, because NumPy has no int4.

    NumPy can make an array from this object. The array shares the tensor's memory and keeps the tensor alive.
    """

    def __init__(self, tensor: Tensor, shape: tuple[int, ...]) -> None:
        self.tensor = tensor
        self.__array_interface__ = {"version": 3, "typestr": "|i1", "shape": shape, "data": (tensor.data_ptr(), False)}


def as_tensor(array: Array) -> Tensor:
    """Makes a tensor that shares the array's memory. An array of uint16 becomes a tensor of bfloat16."""
    return Tensor.from_numpy(array.view(bfloat16) if array.dtype == np.uint16 else array)


def as_storage(tensor: Tensor) -> Array:
    """Waits until the tensor is computed and returns its values as an array. bfloat16 is returned as uint16."""
    array: Array = tensor.asnumpy()
    return array.view(np.uint16) if array.dtype == bfloat16 else array
