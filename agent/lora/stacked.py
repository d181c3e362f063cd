"""The adapter slots of the native op table: the matrices of all adapters of a linear layer, stacked over the slots.

A linear layer has one Parameter for A [slots + 1, inputs, ranks] and one for B [slots + 1, ranks, outputs]. Grouped
matrix products multiply the rows of each adapter by the matrices of its slot. Rows without an adapter use the last
slot, whose matrices stay zero. Loading an adapter only overwrites the matrices of its slot, so no graph is compiled
again.

A layer may join several layers of a checkpoint, such as q, k and v. Then A has the ranks of all these layers, one layer
after another, and B is block diagonal. If an adapter has a smaller rank, zeros fill the remaining ranks. B includes the
adapter's scale.

This module does not import MindSpore.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from agent.lora.store import ModuleAdapter, ParameterAdapter
from agent.weights.storage import STORAGE_DTYPES, Array, from_float32, to_float32
from llm_serving.config import Config
from llm_serving.errors import AgentError
from llm_serving.model.families import FAMILIES

A_NAME, B_NAME = "adapter_a", "adapter_b"
"""Last parts of the names of the Parameters. The name of the layer precedes them."""

Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class StackedSizes:
    """The numbers that determine the shapes of the stacked matrices."""

    num_slots: int
    max_rank: int
    joins_layers: bool
    """True if the checkpoint joins q, k and v to one tensor, and gate and up to one tensor. Each joined tensor then has
    a single adapter.
    """

    @classmethod
    def of_config(cls, config: Config) -> StackedSizes | None:
        """Returns the sizes, or None if the server has no adapters."""
        lora = config.lora_config
        if lora.max_adapters == 0:
            return None
        return cls(lora.max_adapters, lora.max_rank, FAMILIES[config.shape.architecture].joined)

    @property
    def num_groups(self) -> int:
        """The number of slots, including the last slot, which is for tokens without an adapter."""
        return self.num_slots + 1

    def shapes(self, in_features: int, out_features: int, num_layers: int) -> tuple[Shape, Shape]:
        """Returns the shapes of A and B for a linear layer that joins ``num_layers`` layers of a checkpoint."""
        ranks = self.max_rank * (1 if self.joins_layers else num_layers)
        return (self.num_groups, in_features, ranks), (self.num_groups, ranks, out_features)


class StackedMatrices(Protocol):
    """The memory of the Parameters for the matrices A and B."""

    def shapes(self) -> Mapping[str, Shape]:
        """Returns the shape of each Parameter by its name."""

    def write(self, name: str, slot: int, matrix: Array) -> None:
        """Overwrites the matrix of one slot."""


class HostMatrices:
    """Matrices A and B in host memory, which the Parameters use in place (``StackedMatrices``)."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays

    def shapes(self) -> Mapping[str, Shape]:
        return {name: (array.shape[0], array.shape[1], array.shape[2]) for name, array in self._arrays.items()}

    def write(self, name: str, slot: int, matrix: Array) -> None:
        self._arrays[name][slot] = matrix


class StackedSlots:
    """The adapter slots of the native op table (``AdapterSlots``), with stacked matrices."""

    def __init__(self, matrices: StackedMatrices, dtype: str) -> None:
        """``dtype`` is the type of the matrices."""
        self._matrices, self._dtype = matrices, dtype
        self._shapes = matrices.shapes()
        self._written: dict[int, set[str]] = {}
        """For each slot, the layers whose matrices are not zero."""

    def replace(self, slot: int, adapters: Mapping[str, ParameterAdapter]) -> None:
        """Overwrites the matrices of a slot.

        If a layer takes no adapters, or if the adapter does not fit the layer's matrices, raises AgentError and writes
        nothing.
        """
        layers = {name.removesuffix(".weight"): adapter for name, adapter in adapters.items()}
        pairs = {layer: self._pair(layer, adapter) for layer, adapter in layers.items()}
        unused = self._written.get(slot, set()) - layers.keys()
        self._written[slot] = unused | layers.keys()
        for layer, (a, b) in pairs.items():
            self._matrices.write(f"{layer}.{A_NAME}", slot, a)
            self._matrices.write(f"{layer}.{B_NAME}", slot, b)
        for layer in unused:
            name = f"{layer}.{B_NAME}"  # if B is zero, the adapter adds nothing, so A may stay unchanged
            self._matrices.write(name, slot, self._zeros(self._shapes[name][1:]))
        self._written[slot] = set(layers)

    def _pair(self, layer: str, adapter: ParameterAdapter) -> tuple[Array, Array]:
        """Returns A [inputs, ranks] and B [ranks, outputs] of a layer."""
        shape = self._shapes.get(f"{layer}.{A_NAME}")
        if shape is None:
            raise AgentError(f"the linear layer {layer} may have no adapter with native operators")
        _, inputs, ranks = shape
        a, b = self._zeros((inputs, ranks)), self._zeros(self._shapes[f"{layer}.{B_NAME}"][1:])
        rank = 0
        for module in adapter.modules:
            end = rank + module.a.shape[0]
            if end > ranks or module.a.shape[1] != inputs:
                raise AgentError(
                    f"the adapter of {layer} has {module.a.shape[1]} inputs and needs {end} ranks; the layer has "
                    f"{inputs} inputs and an adapter slot has {ranks} ranks"
                )
            a[:, rank:end] = module.a.T
            b[rank:end, module.rows] = self._scaled(layer, module).T
            rank = end
        return a, b

    def _scaled(self, layer: str, module: ModuleAdapter) -> Array:
        """Returns B [outputs, rank] times the scale. The product is computed in float32, and then rounded."""
        try:
            return from_float32(to_float32(module.b, self._dtype) * np.float32(module.scale), self._dtype)
        except OverflowError:
            raise AgentError(f"the adapter of {layer} times its scale is too large for {self._dtype}") from None

    def _zeros(self, shape: tuple[int, ...]) -> Array:
        return np.zeros(shape, STORAGE_DTYPES[self._dtype])
