"""Defines quantised tensors in memory, in one form for all file formats: value = (integer - zero) * scale."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agent.kernels.packing import StaticInputs
from agent.weights.storage import Array, from_float32
from llm_serving.errors import CheckpointError
from llm_serving.model.number_formats import WeightFormat, weight_format

_PIECE_ELEMENTS = 1 << 18
"""Approximate number of elements that are converted at a time."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """Describes how a tensor is quantised: integer format and groups. Joined tensors must have equal schemes."""

    format: str
    """Name of the weight format whose kernels can use the stored integers unchanged."""
    group: int
    """Number of inputs that share a scale. 0 means all inputs of an output."""
    static: bool = False
    """True if the checkpoint has calibrated scales and offsets with which the layer's inputs are quantised."""
    sums_hold_bias: bool = False
    """True if the stored sum offsets include the layer's bias."""

    @property
    def weights(self) -> WeightFormat:
        """The description of the integer format (``llm_serving.model.number_formats``).

        Raises UnknownFormatError if there is no weight format of this name.
        """
        return weight_format(self.format)

    def __str__(self) -> str:
        inputs = " and static inputs" if self.static else ""
        return f"{self.format} with {f'groups of {self.group}' if self.group else 'a scale per row'}{inputs}"


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A quantised weight. With g = ``scheme.group``, scale i of a row belongs to inputs g * i to g * (i + 1) - 1."""

    scheme: Scheme
    values: Array
    """Integers [out, in], one in each byte: int8, or uint8 for formats with zero points."""
    scales: npt.NDArray[np.float32]
    """Scales [out, groups]."""
    zeros: npt.NDArray[np.uint8] | None = None
    """Zero points [out, groups]. None means that every group has the zero point of the format."""
    group_of_input: npt.NDArray[np.int32] | None = None
    """The group of each input [in], if the inputs of a group are not consecutive (GPTQ's ``desc_act``). Otherwise None.

    The kernels cannot read a weight with ``group_of_input``.
    """
    inputs: StaticInputs | None = None
    """How the layer quantises its inputs, if the scheme is static. ``scales`` then contain the scale of the inputs."""
    has_norm_bias: bool = False
    """True if the bias of the norm before the layer is merged into ``inputs``. Float inputs lack this bias."""

    def check_describes_layer(self, name: str) -> None:
        """Raises CheckpointError if the layer cannot be computed with float inputs.

        Float inputs are wrong if the norm before the layer has a bias. The checkpoint has merged this bias into the
        static ``inputs``, and float inputs would not contain the bias.
        """
        if self.has_norm_bias:
            raise CheckpointError(
                f"tensor {name}: the norm before it has a bias, which only static inputs can contain; use "
                "model_config.weight_format auto or int8 with op_table fused (CPU)"
            )

    def dequantise_rows(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Returns the values of rows ``begin`` to ``end`` - 1 as float32 [end - begin, in].

        value = (integer - zero) * scale, rounded once.
        """
        scales, zeros = self.scales[begin:end], None if self.zeros is None else self.zeros[begin:end]
        rows, zero = self.values[begin:end].astype(np.float32), np.float32(self.scheme.weights.zero)
        if self.group_of_input is not None:
            rows -= zero if zeros is None else zeros[:, self.group_of_input]
            rows *= scales[:, self.group_of_input]
            return rows
        grouped = rows.reshape(len(rows), scales.shape[1], -1)
        if zero or zeros is not None:
            grouped -= zero if zeros is None else zeros[:, :, None]
        grouped *= scales[:, :, None]
        if self.inputs is not None:
            rows *= self.inputs.inverses
        return rows

    def dequantise_into(self, out: Array, dtype: str) -> None:
        """Writes the values of all rows to ``out`` as ``dtype``. Raises OverflowError if a value does not fit.

        Raises FloatingPointError if an integer times its scale exceeds float32. This happens only with a damaged file.
        """
        step = max(1, _PIECE_ELEMENTS // max(self.values.shape[1], 1))
        for row in range(0, len(out), step):
            with np.errstate(over="raise"):
                values = self.dequantise_rows(row, row + step)
            out[row : row + step] = from_float32(values, dtype)


def nibbles(words: Array) -> npt.NDArray[np.uint8]:
    """Unpacks 4-bit integers: int32 [..., words] -> uint8 [..., 8 * words]. The lowest bits of a word come first."""
    pairs = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    values = np.empty((*pairs.shape[:-1], 2 * pairs.shape[-1]), np.uint8)
    np.bitwise_and(pairs, 15, out=values[..., 0::2])
    np.right_shift(pairs, 4, out=values[..., 1::2])
    return values


def bytes_of(words: Array) -> npt.NDArray[np.uint8]:
    """Unpacks 8-bit integers: int32 [..., words] -> uint8 [..., 4 * words]. The lowest bits of a word come first.

    The result is a copy.
    """
    return np.array(words, "<i4", order="C").view(np.uint8)


def unpacked(words: Array, bits: int) -> npt.NDArray[np.uint8]:
    """Unpacks integers of ``bits`` bits: int32 [..., words] -> uint8 [..., 32 / bits * words].

    Raises CheckpointError unless ``bits`` is 4 or 8.
    """
    if bits not in _UNPACKERS:
        raise CheckpointError(f"integers of {bits} bits cannot be unpacked; only {sorted(_UNPACKERS)}")
    return _UNPACKERS[bits](words)


_UNPACKERS = {4: nibbles, 8: bytes_of}


def without_usual_zeros(zeros: npt.NDArray[np.uint8], scheme: Scheme) -> npt.NDArray[np.uint8] | None:
    """Returns None if all ``zeros`` are the zero point of the symmetric format, otherwise ``zeros``.

    For example, the zero point of symmetric 4-bit integers is 8.
    """
    return None if bool((zeros == scheme.weights.zero).all()) else zeros


def signed(values: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int8]:
    """Converts unsigned symmetric integers to signed: subtracts the zero point 2^(bits-1) in place."""
    values -= np.uint8(1 << (bits - 1))
    return values.view(np.int8)
