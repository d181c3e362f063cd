"""Defines parts of tensors: the rows and columns that one agent of a group reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from agent.kernels.packing import StaticInputs
from agent.weights.quantized import QuantizedTensor, Scheme
from agent.weights.storage import Array, convert_into
from llm_serving.errors import CheckpointError
from llm_serving.model.parallel import Span

_PIECE_ELEMENTS = 1 << 18
"""Approximate number of elements that are copied at a time."""


@dataclass(frozen=True, slots=True)
class TensorCut:
    """A part of a tensor: a range of rows, and for a matrix also a range of columns."""

    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    rows: Span
    columns: Span | None = None
    """The range of columns. None means all columns."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        rest = self.whole[1:] if self.columns is None else (len(self.columns),)
        return (len(self.rows), *rest)

    def of(self, tensor: Array) -> Array:
        """Returns the part of ``tensor`` as a view."""
        part: Array = tensor.reshape(self.whole)[self.rows.slice]
        return part if self.columns is None else part[:, self.columns.slice]

    def of_quantised(self, tensor: QuantizedTensor) -> QuantizedTensor:
        """Returns a copy of this part of a whole quantised tensor.

        Raises CheckpointError if the part begins or ends in the middle of a group of inputs that share a scale.
        """
        groups = slice(None) if self.columns is None else self.groups(tensor.scheme)
        if self.columns is not None and tensor.group_of_input is not None:
            raise CheckpointError(
                "its groups of inputs are not consecutive (desc_act), so agents cannot share the tensor"
            )
        return replace(
            tensor,
            values=np.ascontiguousarray(self.of(tensor.values)),
            scales=np.ascontiguousarray(tensor.scales[self.rows.slice, groups]),
            zeros=None if tensor.zeros is None else np.ascontiguousarray(tensor.zeros[self.rows.slice, groups]),
            inputs=None if tensor.inputs is None else self._of_inputs(tensor.inputs),
        )

    def _of_inputs(self, inputs: StaticInputs) -> StaticInputs:
        """Returns this agent's part of a layer's static inputs (W8A8): scales, offsets and sum offsets.

        The layer adds the sum offsets to its integer sums. If agents divide the columns among them, the results of all
        agents are added. Therefore only the agent with the first column has sum offsets, and all others have zeros.
        """
        columns = slice(None) if self.columns is None else self.columns.slice
        offsets = np.array(inputs.sum_offsets[self.rows.slice])
        if self.columns is not None and self.columns.start > 0:
            offsets[:] = 0
        return StaticInputs(np.array(inputs.inverses[columns]), np.array(inputs.offsets[columns]), offsets)

    def groups(self, scheme: Scheme) -> slice:
        """Returns the range of groups in this part's columns. The inputs of a group share a scale.

        Raises CheckpointError if the part begins or ends in the middle of a group.
        """
        if self.columns is None or scheme.group == 0:
            return slice(None)
        start, stop = self.columns.start, self.columns.stop
        if start % scheme.group or (stop % scheme.group and stop != self.whole[1]):
            raise CheckpointError(
                f"the part from input {start} to {stop} begins or ends inside a group of {scheme.group} inputs"
            )
        return slice(start // scheme.group, -(-stop // scheme.group))


def copy_cut(source: Array, source_dtype: str, cut: TensorCut, out: Array, out_dtype: str) -> None:
    """Copies one part of ``source`` into ``out``, and reads only that part. Raises OverflowError if a value does not
    fit ``out_dtype``.
    """
    part = cut.of(source)
    step = max(1, _PIECE_ELEMENTS // max(1, part[0].size)) if len(part) else 1
    for row in range(0, len(part), step):
        piece = np.ascontiguousarray(part[row : row + step])
        convert_into(piece, source_dtype, out[row : row + step], out_dtype)
