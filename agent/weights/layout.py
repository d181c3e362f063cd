"""Which tensors of a checkpoint make up which parameter of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from llm_serving.model.parallel import Span

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
    bias: tuple[WeightPart, ...] = ()
    """Of a linear layer, one part for each of ``parts``: in the packed weight, or a parameter of its own."""
    experts: int = 0
    """So many weights of one shape in one parameter, their parts one expert after the other; 0: a weight by itself."""
    float32: bool = False
    """Kept in float32, whatever ``model_dtype`` and ``weight_format``: a router."""

    padded_rows: int = 0
    """Rows of the parameter where that is more than its parts have: zeros follow."""
    input_spans: tuple[Span, ...] = ()
    """Inputs of a linear layer whose products are added up in float32, as by agents that share it; empty: one product
    of all."""

    @property
    def tensors(self) -> tuple[WeightPart, ...]:
        """All that a checkpoint must hold."""
        return self.parts + self.bias

    @property
    def shape(self) -> tuple[int, ...]:
        """As one array; of experts, [experts, rows, ...]."""
        rows = max(sum(part.shape[0] for part in self.parts), self.padded_rows)
        rest = self.parts[0].shape[1:]
        return (self.experts, rows // self.experts, *rest) if self.experts else (rows, *rest)

    def expert(self, index: int) -> WeightSpec:
        """The weight of one expert by itself."""
        each = len(self.parts) // self.experts
        return replace(self, parts=self.parts[index * each : (index + 1) * each], experts=0)

    def bias_spec(self) -> WeightSpec:
        """The bias as a parameter of its own."""
        return WeightSpec(f"{self.parameter.removesuffix('.weight')}.bias", self.bias)
