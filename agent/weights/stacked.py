"""Reads weights of folders in which one tensor has the linear layers of all experts.

gpt-oss stores floats as [experts, in, out], 4-bit floats as [experts, out, in] (``agent.weights.mxfp4``), and biases as
[experts, out]. Qwen3.5 stores floats as [experts, out, in].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from agent.weights.cuts import TensorCut
from agent.weights.layout import StackedIn, WeightPart
from agent.weights.quantized import QuantizedTensor, Scheme
from agent.weights.source import WeightSource
from agent.weights.storage import Array
from llm_serving.model.parallel import Span


def stacked_parts(parts: Iterable[WeightPart]) -> list[WeightPart]:
    """Returns ``parts`` with the tensors of single experts replaced by the tensors of all experts. Each tensor occurs
    once.
    """
    found = {}
    for part in parts:
        place = part.stacked
        stored = part if place is None else WeightPart(place.name, _stored_shape(place, part))
        found[stored.name] = stored
    return list(found.values())


def holds_own_tensors(parts: Iterable[WeightPart], names: Iterable[str]) -> bool:
    """Returns whether a folder with the tensors ``names`` has the first expert's own tensors, of any weight format."""
    stem = next((part.name.rpartition(".")[0] + "." for part in parts if part.stacked is not None), None)
    return stem is not None and any(name.startswith(stem) for name in names)


class StackedSource:
    """A WeightSource that reads the tensors of single experts as parts of another source's tensors, which have all
    experts.
    """

    def __init__(self, source: WeightSource, parts: Iterable[WeightPart]) -> None:
        self._source = source
        self._parts = {part.name: part for part in parts if part.stacked is not None}

    def scheme(self, part: WeightPart) -> Scheme | None:
        stored = self._parts.get(part.name)
        return self._source.scheme(part if stored is None else _rows_of_all(stored))

    def float_dtype(self, name: str) -> str | None:
        stored = self._parts.get(name)
        return self._source.float_dtype(name if stored is None else _place(stored).name)

    def read_quantised(self, part: WeightPart, cut: TensorCut | None = None) -> QuantizedTensor:
        stored = self._parts.get(part.name)
        if stored is None:
            return self._source.read_quantised(part, cut)
        place, whole = _place(stored), _rows_of_all(stored)
        span, columns = _span(place, stored, cut), None if cut is None else cut.columns
        tensor = self._source.read_quantised(whole, TensorCut(whole.shape, span, columns))
        values, scales = tensor.values[:: place.step], tensor.scales[:: place.step]
        return replace(tensor, values=np.ascontiguousarray(values), scales=np.ascontiguousarray(scales))

    def read_into(self, name: str, out: Array, dtype: str, cut: TensorCut | None = None) -> None:
        stored = self._parts.get(name)
        if stored is None:
            self._source.read_into(name, out, dtype, cut)
        elif _place(stored).inputs_last or self.scheme(stored) is not None:
            self._read_rows(stored, out, dtype, cut)
        else:
            self._read_floats(stored, out, dtype, cut)

    def close(self) -> None:
        self._source.close()

    def _read_rows(self, stored: WeightPart, out: Array, dtype: str, cut: TensorCut | None) -> None:
        """Reads the weight of one expert from its rows in the stored matrix [experts x out, in]."""
        place, whole = _place(stored), _rows_of_all(stored)
        rows, columns = _span(place, stored, cut), None if cut is None else cut.columns
        piece = np.empty((len(rows), out.shape[1]), out.dtype)
        self._source.read_into(place.name, piece, dtype, TensorCut(whole.shape, rows, columns))
        out[...] = piece[:: place.step]

    def _read_floats(self, stored: WeightPart, out: Array, dtype: str, cut: TensorCut | None) -> None:
        """Reads the floats of one expert: a weight, stored as [in, out], or a bias [out]."""
        place = _place(stored)
        depth = stored.shape[1] if len(stored.shape) > 1 else 1
        inputs = Span(0, depth) if cut is None or cut.columns is None else cut.columns
        rows = Span(place.expert * depth + inputs.start, place.expert * depth + inputs.stop)
        outputs = _span(place, stored, cut)
        first = place.expert * place.outputs
        columns = Span(outputs.start - first, outputs.stop - first)
        piece = np.empty((len(rows), len(columns)), out.dtype)
        self._source.read_into(
            place.name, piece, dtype, TensorCut((place.experts * depth, place.outputs), rows, columns)
        )
        out[...] = piece[:, :: place.step].T.reshape(out.shape)


def _place(part: WeightPart) -> StackedIn:
    assert part.stacked is not None, "only parts with a place are kept"
    return part.stacked


def _stored_shape(place: StackedIn, part: WeightPart) -> tuple[int, ...]:
    """Returns the shape of the folder's tensor that has ``part`` of every expert."""
    if place.inputs_last:
        return (place.experts, place.outputs, *part.shape[1:])
    return (place.experts, *part.shape[1:], place.outputs)


def _rows_of_all(part: WeightPart) -> WeightPart:
    """Returns the description of the tensor of all experts, reshaped to a matrix [experts x out, in]."""
    place = _place(part)
    return WeightPart(place.name, (place.experts * place.outputs, *part.shape[1:]))


def _span(place: StackedIn, part: WeightPart, cut: TensorCut | None) -> Span:
    """Returns the range of rows of the matrix [experts x out, in] that contains an expert's tensor, or its ``cut``.

    The range is from the first to the last output of the expert's tensor. If ``StackedIn.step`` is above 1, rows of
    other tensors are between the rows of this range, for example rows of the up projection between rows of the gate.
    """
    rows = Span(0, part.shape[0]) if cut is None else cut.rows
    begin = place.expert * place.outputs + place.first
    return Span(begin + place.step * rows.start, begin + place.step * (rows.stop - 1) + 1)
