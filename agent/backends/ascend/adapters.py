"""Writes the matrices of LoRA adapters into device memory with MindSpore's ``swap_cache``. Sources: docs/ascend.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore._c_expression import swap_cache

from agent.layers.parameter import as_tensor, create_on_device
from agent.lora.stacked import Shape
from agent.weights.storage import Array
from llm_serving.errors import AgentError


class DeviceMatrices:
    """Stores the LoRA matrices of all adapter slots in the memory of the device. Implements the interface
    ``agent.lora.stacked.StackedMatrices``.

    MindSpore's ``swap_cache`` overwrites the matrix of one slot. The tensor keeps its address, so no graph is compiled
    again. ``swap_cache`` reports no errors, so this class reads each matrix back and compares the bytes.
    """

    def __init__(self, parameters: Mapping[str, Any], *, creates: bool = True) -> None:
        """Allocates the ``parameters`` on the device, filled with zeros.

        ``creates=False`` skips the allocation. Tests on a CPU use it, because their parameters already have memory.
        """
        self._parameters = parameters
        for parameter in parameters.values() if creates else ():
            create_on_device(parameter)

    def shapes(self) -> Mapping[str, Shape]:
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    def write(self, name: str, slot: int, matrix: Array) -> None:
        """Overwrites the matrix of one slot. Raises AgentError if the device does not have the bytes of ``matrix``
        after the copy.
        """
        parameter = self._parameters[name]
        sent = np.ascontiguousarray(matrix)[None]
        returned = as_tensor(np.zeros_like(sent))
        swap_cache(as_tensor(sent), parameter, Tensor(np.array([(0, slot)], np.int64)), False)
        swap_cache(returned, parameter, Tensor(np.array([(slot, 0)], np.int64)), True)
        if returned.asnumpy().tobytes() != sent.tobytes():
            raise AgentError(
                f"the matrix of an adapter that was copied to {name} of the device has changed: MindSpore's swap_cache "
                "does not work on this machine; set lora_config.max_adapters: 0"
            )
