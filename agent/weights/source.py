"""What the loader asks of wherever weights come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from agent.weights.layout import WeightPart
from agent.weights.quantized import QuantizedTensor, Scheme
from agent.weights.storage import Array

if TYPE_CHECKING:
    from agent.weights.cuts import TensorCut


class WeightSource(Protocol):
    """Gives tensors by their Hugging Face name, in any order and as often as asked."""

    def scheme(self, part: WeightPart) -> Scheme | None:
        """How a tensor is quantised; None: it is kept as floats."""

    def float_dtype(self, name: str) -> str | None:
        """The type a tensor of floats is kept in; None where there is none of its own."""

    def read_quantised(self, part: WeightPart, cut: TensorCut | None = None) -> QuantizedTensor:
        """A tensor that has a ``scheme``, or a part of it, in memory of its own. Raises CheckpointError."""

    def read_into(self, name: str, out: Array, dtype: str, cut: TensorCut | None = None) -> None:
        """Fill ``out``, a contiguous array that stores ``dtype``, with the tensor or a part of it, a quantised one
        being multiplied out. Raises CheckpointError."""

    def close(self) -> None:
        """Give back what reading needed."""
