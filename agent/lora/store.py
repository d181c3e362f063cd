"""The adapter slots of an agent. A slot has one LoRA adapter. A step names the slot of each sequence.

This module does not import MindSpore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agent.group.model_part import ModelPart
from agent.kernels.step_copy import Int32Array
from agent.lora.places import Place, adapter_places
from agent.weights.layout import WeightSpec
from agent.weights.storage import STORAGE_DTYPES, Array
from llm_serving.errors import AgentError, ProtocolError
from llm_serving.ipc.adapters import AdapterMemory


@dataclass(frozen=True, slots=True)
class ModuleAdapter:
    """The adapter of one checkpoint tensor. The tensor provides some rows (outputs) of a parameter."""

    rows: slice
    """The rows of the parameter that come from this tensor, for example the query's rows in a joined QKV weight."""
    scale: float
    a: Array
    """Matrix A of the adapter, [rank, inputs]."""
    b: Array
    """Matrix B of the adapter, [outputs, rank]."""


@dataclass(frozen=True, slots=True)
class ParameterAdapter:
    """The LoRA adapter of one parameter. A parameter that joins several checkpoint tensors has a ``ModuleAdapter`` for
    each of them, in the order of their rows."""

    spec: WeightSpec
    modules: tuple[ModuleAdapter, ...]


class AdapterSlots(Protocol):
    """The memory from which the operators of an op table read adapters."""

    def replace(self, slot: int, adapters: Mapping[str, ParameterAdapter]) -> None:
        """Replaces the adapter of a slot.

        ``adapters`` has the new adapter's matrices for each parameter that it changes, by the parameter's name. Other
        parameters have no adapter in this slot afterwards.
        """


class AdapterStore:
    """Loads adapters into the adapter slots of the operators. The caller must ensure that no step runs during a load.
    """

    def __init__(
        self,
        part: ModelPart,
        dtype: str,
        slots: AdapterSlots,
        loaded: Sequence[Int32Array],
        *,
        equal_vocabularies: bool = False,
    ) -> None:
        """``dtype`` is the type of the matrices. With ``equal_vocabularies``, all agents have the same number of
        vocabulary rows. Rows of padding follow the end of the vocabulary.

        ``loaded`` has arrays [adapter slots], in which the store marks the slots in use: 1 for a slot with an adapter,
        otherwise 0.
        """
        self._dtype, self._slots, self._loaded = dtype, slots, loaded
        self._places = adapter_places(part, equal_vocabularies=equal_vocabularies)

    def load(self, slot: int, name: str, num_bytes: int) -> None:
        """Loads the adapter in the shared memory ``name`` into a slot. Replaces the slot's earlier adapter.

        Raises ProtocolError if the message or the memory is wrong. Raises AgentError if the adapter does not fit the
        model.
        """
        num_slots = self._loaded[0].size
        if not 0 <= slot < num_slots:
            raise ProtocolError(f"an adapter is for slot {slot}; there are {num_slots} adapter slots")
        memory = AdapterMemory.attach(name, num_bytes, STORAGE_DTYPES[self._dtype])
        modules: dict[str, list[ModuleAdapter]] = {}
        specs: dict[str, WeightSpec] = {}
        for module, a, b in memory.modules():
            for place in self._places_of(f"{module.name}.weight"):
                if (place.outputs, place.inputs) != (module.outputs, module.inputs):
                    raise AgentError(
                        f"the adapter of {module.name} has {module.outputs} outputs and {module.inputs} inputs; the "
                        f"layer has {place.outputs} and {place.inputs}"
                    )
                specs[place.spec.parameter] = place.spec
                own = ModuleAdapter(place.rows, module.scale, *place.matrices(a, b))
                modules.setdefault(place.spec.parameter, []).append(own)
        adapters = {
            parameter: ParameterAdapter(specs[parameter], tuple(sorted(found, key=lambda each: each.rows.start)))
            for parameter, found in modules.items()
        }
        for loaded in self._loaded:
            loaded[slot] = 0
        self._slots.replace(slot, adapters)
        for loaded in self._loaded:
            loaded[slot] = 1

    def _places_of(self, tensor: str) -> tuple[Place, ...]:
        """Returns the places of a checkpoint tensor in this agent's parameters.

        The result is empty if another pipeline stage has the tensor.
        """
        if tensor not in self._places:
            raise AgentError(f"the model has no linear layer {tensor} that may have an adapter")
        return self._places[tensor]
