"""Which tensors of a checkpoint make up which parameter of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WeightKind = Literal["plain", "linear", "gated_linear"]
"""``plain`` parameters stay arrays of ``model_dtype`` (norms, embeddings). The weight of a linear layer may be packed,
also that of a gated one, whose first half of rows is the gate and whose second half goes through it."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A tensor of the checkpoint, under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A parameter of the model: its parts one after the other along the first axis (q, k and v make one qkv)."""

    parameter: str
    parts: tuple[WeightPart, ...]
    kind: WeightKind = "plain"
    packed_only: bool = False
    """There is such a parameter only where weights are packed: a tied output layer, which is else the embedding."""

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(part.shape[0] for part in self.parts)
        return (rows, *self.parts[0].shape[1:])
