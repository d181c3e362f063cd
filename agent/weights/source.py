"""Defines the interface between the weight loader and the sources of weights: checkpoints and random numbers."""

from __future__ import annotations

from typing import Protocol

from agent.weights.cuts import TensorCut
from agent.weights.layout import WeightPart
from agent.weights.quantized import QuantizedTensor, Scheme
from agent.weights.storage import Array


class WeightSource(Protocol):
    """Reads tensors by their Hugging Face names, in any order and any number of times."""

    def scheme(self, part: WeightPart) -> Scheme | None:
        """Returns how a tensor is quantised, or None for a tensor of floats."""

    def float_dtype(self, name: str) -> str | None:
        """Returns the type in which a tensor of floats is stored, or None if the source can produce any type."""

    def read_quantised(self, part: WeightPart, cut: TensorCut | None = None) -> QuantizedTensor:
        """Reads a tensor that has a ``scheme``, or one part of the tensor, into new memory. Raises CheckpointError if
        the stored values are not valid.
        """

    def read_into(self, name: str, out: Array, dtype: str, cut: TensorCut | None = None) -> None:
        """Fills ``out`` with a tensor or one part of the tensor, and dequantises it if necessary.

        ``out`` is a contiguous array that stores ``dtype``. Raises CheckpointError if a value does not fit ``dtype``.
        """

    def close(self) -> None:
        """Closes files and frees memory. Afterwards, no tensor can be read."""


class CutSource:
    """A WeightSource that reads only one part of each tensor of another source."""

    def __init__(self, source: WeightSource, cuts: dict[str, TensorCut]) -> None:
        """``cuts`` maps tensor names to parts. Tensors that are not in ``cuts`` are read whole."""
        self._source = source
        self._cuts = cuts

    def scheme(self, part: WeightPart) -> Scheme | None:
        cut = self._cuts.get(part.name)
        return self._source.scheme(part if cut is None else WeightPart(part.name, cut.whole))

    def float_dtype(self, name: str) -> str | None:
        return self._source.float_dtype(name)

    def read_quantised(self, part: WeightPart, cut: TensorCut | None = None) -> QuantizedTensor:
        assert cut is None, "a part is not cut again"
        own = self._cuts.get(part.name)
        return self._source.read_quantised(part if own is None else WeightPart(part.name, own.whole), own)

    def read_into(self, name: str, out: Array, dtype: str, cut: TensorCut | None = None) -> None:
        assert cut is None, "a part is not cut again"
        self._source.read_into(name, out, dtype, self._cuts.get(name))

    def close(self) -> None:
        self._source.close()
