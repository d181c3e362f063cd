"""Which tensors of a checkpoint make up which parameter of the model."""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(part.shape[0] for part in self.parts)
        return (rows, *self.parts[0].shape[1:])
