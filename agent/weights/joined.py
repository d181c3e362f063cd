"""Reads weights of checkpoints that store several tensors of the model as one larger tensor, such as Phi-3's qkv."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from agent.weights.cuts import TensorCut
from agent.weights.layout import RowsOf, WeightPart
from agent.weights.quantized import QuantizedTensor, Scheme
from agent.weights.source import WeightSource
from agent.weights.storage import Array
from llm_serving.model.parallel import Span


def stored_parts(parts: Iterable[WeightPart]) -> list[WeightPart]:
    """Returns the tensors of the checkpoint that must be read for ``parts``. If a part consists of rows of a larger
    tensor, the result has the larger tensor instead. Each tensor occurs only once.
    """
    found = {}
    for part in parts:
        rows = part.rows_of
        stored = part if rows is None else WeightPart(rows.name, rows.shape)
        found[stored.name] = stored
    return list(found.values())


class JoinedSource:
    """A WeightSource that reads some tensors as rows of larger tensors of another source."""

    def __init__(self, source: WeightSource, places: Mapping[str, RowsOf]) -> None:
        """``places`` maps names of tensors to the rows of the larger tensors. Other tensors are read by their names."""
        self._source = source
        self._places = places

    def scheme(self, part: WeightPart) -> Scheme | None:
        rows = self._places.get(part.name)
        return self._source.scheme(part if rows is None else WeightPart(rows.name, rows.shape))

    def float_dtype(self, name: str) -> str | None:
        rows = self._places.get(name)
        return self._source.float_dtype(name if rows is None else rows.name)

    def read_quantised(self, part: WeightPart, cut: TensorCut | None = None) -> QuantizedTensor:
        rows = self._places.get(part.name)
        if rows is None:
            return self._source.read_quantised(part, cut)
        own = _cut_of(rows, part.shape if cut is None else cut.whole, cut)
        tensor = self._source.read_quantised(WeightPart(rows.name, rows.shape), own)
        return _reordered(tensor, rows.head_order, rows.stored_head) if rows.head_order else tensor

    def read_into(self, name: str, out: Array, dtype: str, cut: TensorCut | None = None) -> None:
        rows = self._places.get(name)
        if rows is None:
            self._source.read_into(name, out, dtype, cut)
            return
        own = _cut_of(rows, out.shape if cut is None else cut.whole, cut)
        if rows.stored_head:
            stored = np.empty(own.shape, out.dtype)
            self._source.read_into(rows.name, stored, dtype, own)
            out[:] = _in_order(stored, rows.head_order, rows.stored_head)
            return
        self._source.read_into(rows.name, out, dtype, own)
        if rows.head_order:
            out[:] = _in_order(out, rows.head_order)

    def close(self) -> None:
        self._source.close()


def _in_order(rows: Array, order: tuple[int, ...], stored_head: int = 0) -> Array:
    """Returns a copy of ``rows`` with the rows of each head that ``order`` lists, in this order.

    ``rows`` is [heads x rows of a head, ...]. ``order`` has indices of rows within a head. ``stored_head`` is the
    number of rows that a head has in ``rows``. 0 means that ``order`` lists all rows of a head.
    """
    taken = rows.reshape(-1, stored_head or len(order), *rows.shape[1:])[:, list(order)]
    return taken.reshape(-1, *rows.shape[1:])


def _reordered(tensor: QuantizedTensor, order: tuple[int, ...], stored_head: int = 0) -> QuantizedTensor:
    inputs = tensor.inputs
    if inputs is not None:
        inputs = replace(inputs, sum_offsets=np.ascontiguousarray(_in_order(inputs.sum_offsets, order, stored_head)))
    return replace(
        tensor,
        values=_in_order(tensor.values, order, stored_head),
        scales=_in_order(tensor.scales, order, stored_head),
        zeros=None if tensor.zeros is None else _in_order(tensor.zeros, order, stored_head),
        inputs=inputs,
    )


def _cut_of(rows: RowsOf, shape: tuple[int, ...], cut: TensorCut | None) -> TensorCut:
    """Returns the part of a stored tensor that must be read for ``cut``. The stored tensor contains a smaller, inner
    tensor.

    ``rows`` describes which rows of the stored tensor the inner tensor has. ``shape`` is the shape of the inner tensor.
    ``cut`` is a part of the inner tensor, or None for all of it.
    """
    own, columns = (Span(0, shape[0]), None) if cut is None else (cut.rows, cut.columns)
    if rows.stored_head:
        # All stored rows of the heads are read, because the selected rows are not adjacent.
        heads, rest = zip(*(divmod(row, len(rows.head_order)) for row in (own.start, own.stop)), strict=True)
        assert not any(rest), "a cut has whole heads"
        own = Span(heads[0] * rows.stored_head, heads[1] * rows.stored_head)
    return TensorCut(rows.shape, Span(rows.first + own.start, rows.first + own.stop), columns)
