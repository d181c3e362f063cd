"""Parts of tensors: what an agent reads of a tensor that it shares with others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from agent.weights.layout import WeightPart
from agent.weights.quantized import QuantizedTensor, Scheme
from agent.weights.source import WeightSource
from agent.weights.storage import Array, convert_into
from llm_serving.errors import CheckpointError
from llm_serving.model.parallel import Span

_PIECE_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class TensorCut:
    """Consecutive rows of a tensor, and of a matrix consecutive columns of these."""

    whole: tuple[int, ...]
    """Shape of the tensor."""
    rows: Span
    columns: Span | None = None
    """None: all."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        rest = self.whole[1:] if self.columns is None else (len(self.columns),)
        return (len(self.rows), *rest)

    def of(self, tensor: Array) -> Array:
        """A view."""
        part: Array = tensor.reshape(self.whole)[self.rows.slice]
        return part if self.columns is None else part[:, self.columns.slice]

    def of_quantised(self, tensor: QuantizedTensor) -> QuantizedTensor:
        """Of one that was read whole. Raises CheckpointError where columns part a group."""
        groups = slice(None) if self.columns is None else self.groups(tensor.scheme)
        if self.columns is not None and tensor.group_of_input is not None:
            raise CheckpointError("its groups are not consecutive inputs (desc_act): it cannot be divided among agents")
        return replace(
            tensor,
            values=np.ascontiguousarray(self.of(tensor.values)),
            scales=np.ascontiguousarray(tensor.scales[self.rows.slice, groups]),
            zeros=None if tensor.zeros is None else np.ascontiguousarray(tensor.zeros[self.rows.slice, groups]),
        )

    def groups(self, scheme: Scheme) -> slice:
        """Those of the columns. Raises CheckpointError where columns part a group."""
        if self.columns is None or scheme.group == 0:
            return slice(None)
        start, stop = self.columns.start, self.columns.stop
        if start % scheme.group or (stop % scheme.group and stop != self.whole[1]):
            raise CheckpointError(f"columns {start} to {stop} part a group of {scheme.group} inputs with one scale")
        return slice(start // scheme.group, -(-stop // scheme.group))


def copy_cut(source: Array, source_dtype: str, cut: TensorCut, out: Array, out_dtype: str) -> None:
    """Copy a part of ``source`` into ``out``, looking at nothing else of it. Raises as ``convert_into``."""
    part = cut.of(source)
    step = max(1, _PIECE_ELEMENTS // max(1, part[0].size)) if len(part) else 1
    for row in range(0, len(part), step):
        piece = np.ascontiguousarray(part[row : row + step])
        convert_into(piece, source_dtype, out[row : row + step], out_dtype)


class CutSource:
    """A source whose tensors are parts of those of another (see ``agent.weights.source``)."""

    def __init__(self, source: WeightSource, cuts: dict[str, TensorCut]) -> None:
        """``cuts`` by the tensor's name; the others are whole."""
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
