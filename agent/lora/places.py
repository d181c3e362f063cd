"""Finds which rows and columns of a LoRA adapter's matrices an agent needs, and to which of its parameters they belong.

If a layer is split by its outputs, an agent has all columns of A and its own rows of B. If a layer is split by its
inputs, an agent has its own columns of A and all rows of B. The layer then sums its results over the agents. This sum
also adds the terms of the adapter: ``B (A x)`` is the sum of ``B (A_i x_i)`` over the agents i.

This module does not import MindSpore.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from agent.group.model_part import ModelPart
from agent.models.names import weight_specs
from agent.weights.cuts import TensorCut
from agent.weights.layout import WeightPart, WeightSpec, rows_of
from agent.weights.sharding import shard_specs
from agent.weights.storage import Array

_Order = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one checkpoint tensor in an agent's parameter: which rows of the parameter come from the tensor."""

    spec: WeightSpec
    """The agent's parameter whose layer adds the adapter to its output."""
    rows: slice
    outputs: int
    inputs: int
    """``outputs`` and ``inputs`` are the sizes of the whole tensor."""
    order: _Order
    """For each of ``rows``, the index of the row in the tensor."""
    columns: slice
    """The tensor's columns that the agent has."""

    def matrices(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Returns the agent's parts of A [rank, inputs] and B [outputs, rank]."""
        return a[:, self.columns], b[self.order]

    def followed_by(self, other: Place) -> Place:
        """Joins two places of one tensor. The rows of this place come first, then the rows of ``other``."""
        order = np.concatenate([self.order, other.order])
        return replace(self, rows=slice(self.rows.start, other.rows.stop), order=order)


def adapter_places(part: ModelPart, *, equal_vocabularies: bool) -> dict[str, tuple[Place, ...]]:
    """Returns where the agent's parameters have the rows of each checkpoint tensor that may have an adapter.

    The keys are the names of the tensors. A tensor has a ``Place`` for each parameter that contains some of its rows.
    For example, the query weight of a hybrid model also has the rows of the output gate. A tensor without a place
    belongs to another pipeline stage. With ``equal_vocabularies``, all agents have the same number of vocabulary rows.
    Rows of padding follow the end of the vocabulary.
    """
    specs = [spec for spec in weight_specs(part.whole) if _may_have_adapter(spec)]
    own = shard_specs(specs, part, equal_vocabularies=equal_vocabularies)
    local = {each.name: (spec, rows) for spec in own.specs for each, rows in rows_of(spec.parts)}
    places: dict[str, dict[str, Place]] = {}
    for name, each in _parts(specs):
        found = places.setdefault(name, {})
        spec_and_rows = local.get(each.name)
        if spec_and_rows is not None:
            place = _place(each, *spec_and_rows, own.cuts.get(each.name))
            before = found.get(place.spec.parameter)
            found[place.spec.parameter] = place if before is None else before.followed_by(place)
    return {name: tuple(found.values()) for name, found in places.items()}


def _may_have_adapter(spec: WeightSpec) -> bool:
    return spec.kind != "plain" and not (spec.experts or spec.float32 or spec.head_rows)


def _parts(specs: list[WeightSpec]) -> Iterator[tuple[str, WeightPart]]:
    """Yields the parts of all parameters, each with the name of the checkpoint tensor that contains it."""
    for spec in specs:
        for part in spec.parts:
            yield part.name if part.rows_of is None else part.rows_of.name, part


def _place(part: WeightPart, spec: WeightSpec, rows: slice, cut: TensorCut | None) -> Place:
    """Returns the place of ``part``: all rows of a checkpoint tensor, or some rows of a tensor such as Phi-3's qkv.

    ``spec`` is the agent's parameter, and ``rows`` are the rows of this parameter that come from ``part``. ``cut``
    describes which rows and columns the agent has, or is None if the agent has all of them.
    """
    stored = part.rows_of
    order: _Order = np.arange(part.shape[0])
    if stored is not None:
        if stored.head_order:
            num_heads, each = len(order) // len(stored.head_order), stored.stored_head or len(stored.head_order)
            order = (each * np.arange(num_heads)[:, None] + np.array(stored.head_order)).reshape(-1)
        order = order + stored.first
    columns = slice(None)
    if cut is not None:
        order = order[cut.rows.slice]
        columns = columns if cut.columns is None else cut.columns.slice
    return Place(spec, rows, (part if stored is None else stored).shape[0], part.shape[1], order, columns)
