"""The adapter slots of an agent: each holds a LoRA adapter that steps may name.

This module does not import MindSpore.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agent.kernels.library import load_library
from agent.kernels.step_copy import Int32Array
from agent.lora.packed import ModuleAdapter, PackedAdapter
from agent.models.names import weight_specs
from agent.weights.layout import WeightSpec, rows_of
from agent.weights.storage import STORAGE_DTYPES, Array
from llm_serving.errors import AgentError, ProtocolError
from llm_serving.ipc.adapters import AdapterMemory
from llm_serving.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class _Place:
    """The rows of a parameter that come from one checkpoint tensor."""

    spec: WeightSpec
    rows: slice
    order: npt.NDArray[np.intp] | None = None
    """For each of these rows, its number in the tensor. None if the order is the same."""


def _places_of(spec: WeightSpec) -> dict[str, _Place]:
    """Returns the places of a parameter's tensors. A tensor may be joined of several parts, as Phi-3's qkv is."""
    places: dict[str, _Place] = {}
    for part, rows in rows_of(spec.parts):
        if part.rows_of is None:
            places[part.name] = _Place(spec, rows)
            continue
        stored = part.rows_of
        order = np.arange(stored.first, stored.first + part.shape[0])
        if stored.head_order:
            order = order.reshape(-1, len(stored.head_order))[:, list(stored.head_order)].reshape(-1)
        before = places.get(stored.name)
        if before is not None and before.order is not None:
            rows, order = slice(before.rows.start, rows.stop), np.concatenate([before.order, order])
        places[stored.name] = _Place(spec, rows, order)
    return places


class AdapterStore:
    """Loads adapters into the adapter slots of the kernels. No step may run meanwhile."""

    def __init__(self, shape: ModelShape, dtype: str, weights: Mapping[str, Array], loaded: Int32Array) -> None:
        """``weights`` are the packed weights by the names of the parameters. They stay at their addresses.

        ``loaded`` [adapter slots] is set to 1 for each slot that has an adapter.
        """
        self._dtype = dtype
        self._weights = weights
        self._loaded = loaded
        self._places: dict[str, _Place] = {}
        """The place of each checkpoint tensor that may have an adapter, by the tensor's name."""
        for spec in weight_specs(shape):
            if spec.kind != "plain" and not (spec.experts or spec.float32 or spec.head_rows):
                self._places |= _places_of(spec)
        self._packed: list[dict[str, PackedAdapter]] = [{} for _ in range(loaded.size)]

    @property
    def num_bytes(self) -> int:
        """The memory of all adapters."""
        return sum(packed.num_bytes for slot in self._packed for packed in slot.values())

    def load(self, slot: int, name: str, num_bytes: int) -> None:
        """Copies the adapter in the shared memory ``name`` into a slot, instead of the slot's earlier adapter.

        Raises ProtocolError if the message or the memory is wrong. Raises AgentError if the adapter does not fit the
        model.
        """
        if not 0 <= slot < len(self._packed):
            raise ProtocolError(f"an adapter is for slot {slot}; there are {len(self._packed)} adapter slots")
        memory = AdapterMemory.attach(name, num_bytes, STORAGE_DTYPES[self._dtype])
        modules: dict[str, list[ModuleAdapter]] = {}
        specs: dict[str, WeightSpec] = {}
        for module, a, b in memory.modules():
            place = self._place(f"{module.name}.weight")
            spec, rows = place.spec, place.rows
            if (rows.stop - rows.start, spec.shape[1]) != (module.outputs, module.inputs):
                raise AgentError(f"the adapter of {module.name} has other sizes than the layer")
            specs[spec.parameter] = spec
            b = b if place.order is None else b[place.order]
            modules.setdefault(spec.parameter, []).append(ModuleAdapter(rows, module.scale, a, b))
        packed = {
            parameter: PackedAdapter(specs[parameter], sorted(found, key=lambda each: each.rows.start), self._dtype)
            for parameter, found in modules.items()
        }
        self._replace(slot, packed)

    def _place(self, tensor: str) -> _Place:
        if tensor not in self._places:
            raise AgentError(f"the model has no linear layer {tensor} that may have an adapter")
        return self._places[tensor]

    def _replace(self, slot: int, packed: dict[str, PackedAdapter]) -> None:
        set_adapter = load_library().llmk_set_adapter
        self._loaded[slot] = 0
        for parameter in self._packed[slot]:
            set_adapter(self._weights[parameter].ctypes.data, slot, None)
        self._packed[slot] = packed
        for parameter, each in packed.items():
            set_adapter(self._weights[parameter].ctypes.data, slot, each.address)
        self._loaded[slot] = 1
