"""Rounds weights to integers with a scale and a zero point for each group, and stores them as compressed-tensors.

A weight is [out, in] float32. A group is g consecutive inputs of a row. A group has one scale, so a row has in / g
scales. The integers are unsigned, from 0 to 2^bits - 1. The zero point of a group is the integer that stands for 0. If
the format stores no zero points, every zero point is 2^(bits - 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.weights.storage import from_float32, to_float32
from llm_serving.model.number_formats import stored_format

Float32Array = NDArray[np.float32]
_SMALLEST_SCALE = np.float32(2.0**-24)
"""Minimum scale, for groups of zeros: the smallest positive float16. A scale of 0 would cause a division by 0."""


@dataclass(frozen=True)
class Settings:
    """Settings of the rounding of weights to integers: bits, groups, zero points, and the type of the scales."""

    bits: int
    group: int
    """Number of inputs that share a scale; 0 means all inputs of an output."""
    asymmetric: bool
    """If True, each group has a stored zero point."""
    scale_dtype: str
    """Type in which scales are stored. Weights are rounded with scales that already have this type."""

    def __post_init__(self) -> None:
        stored_format(self.bits)  # raises an error if no format has this number of bits

    @property
    def layout(self) -> str:
        """Name of the layout in compressed-tensors.

        ``int-quantized`` has a byte for each integer, ``pack-quantized`` has several integers in a 32-bit word.
        """
        return "int-quantized" if "int-quantized" in stored_format(self.bits).layouts else "pack-quantized"

    def group_of(self, depth: int) -> int:
        return self.group or depth

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def largest(self) -> int:
        return (1 << self.bits) - 1

    def round_scales(self, scales: Float32Array) -> Float32Array:
        """Rounds scales to the type in which the checkpoint stores them."""
        return to_float32(from_float32(np.maximum(scales, _SMALLEST_SCALE), self.scale_dtype), self.scale_dtype)


@dataclass(frozen=True)
class Quantised:
    """A weight as integers ``q`` [out, in], with scales and zero points [out, groups]."""

    q: NDArray[np.uint8]
    scales: Float32Array
    zeros: NDArray[np.uint8]

    def values(self) -> Float32Array:
        """Returns the values [out, in] that the integers represent."""
        rows, depth = self.q.shape
        q = self.q.reshape(rows, self.scales.shape[1], -1).astype(np.float32)
        return ((q - self.zeros[:, :, None]) * self.scales[:, :, None]).reshape(rows, depth)


def fit(groups: Float32Array, settings: Settings) -> tuple[Float32Array, Float32Array]:
    """Returns scales and zero points of ``groups`` [..., g], which cover the range of each group.

    If the format has zero points, the range is from the minimum to the maximum of the group, otherwise it is symmetric
    around 0.
    """
    if not settings.asymmetric:
        scales = np.abs(groups).max(axis=-1) / np.float32(settings.middle - 1)
        return settings.round_scales(scales), np.full(scales.shape, settings.middle, np.float32)
    low, high = np.minimum(groups.min(axis=-1), 0), np.maximum(groups.max(axis=-1), 0)
    scales = settings.round_scales((high - low) / np.float32(settings.largest))
    return scales, np.clip(np.rint(-low / scales), 0, settings.largest).astype(np.float32)


def round_to(values: Float32Array, scales: Float32Array, zeros: Float32Array, settings: Settings) -> Float32Array:
    """Returns the nearest integers of ``values / scales + zeros`` as float32. Arrays broadcast.

    Without zero points, the lowest integer is not used, so that the range is symmetric.
    """
    lowest = 0 if settings.asymmetric else 1
    return np.clip(np.rint(values / scales) + zeros, lowest, settings.largest).astype(np.float32)


def round_to_nearest(weight: Float32Array, settings: Settings) -> Quantised:
    """Rounds every element of a weight [out, in] to the nearest integer, group by group."""
    rows, depth = weight.shape
    groups = weight.reshape(rows, -1, settings.group_of(depth))
    scales, zeros = fit(groups, settings)
    q = round_to(groups, scales[:, :, None], zeros[:, :, None], settings)
    return Quantised(q.reshape(rows, depth).astype(np.uint8), scales, zeros.astype(np.uint8))


def stored_arrays(stem: str, weight: Quantised, settings: Settings) -> Mapping[str, NDArray[Any]]:
    """Returns the tensors, by name, in which the format compressed-tensors stores a weight."""
    scales = from_float32(weight.scales, settings.scale_dtype)
    if settings.layout == "int-quantized":
        signed = (weight.q.astype(np.int16) - settings.middle).astype(np.int8)
        return {f"{stem}.weight": signed, f"{stem}.weight_scale": scales}
    arrays: dict[str, NDArray[Any]] = {
        f"{stem}.weight_packed": pack_words(weight.q, settings.bits),
        f"{stem}.weight_scale": scales,
        f"{stem}.weight_shape": np.array(weight.q.shape, np.int64),
    }
    if settings.asymmetric:
        arrays[f"{stem}.weight_zero_point"] = np.ascontiguousarray(pack_words(weight.zeros.T, settings.bits).T)
    return arrays


def pack_words(values: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Packs integers [rows, columns] of ``bits`` bits into 32-bit words, separately for each row.

    The first integer of a word is in its lowest bits. The last word of a row is filled with zeros.
    """
    per_word = 32 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % per_word))).astype(np.uint32)
    words = np.zeros((len(padded), padded.shape[1] // per_word), np.uint32)
    for place in range(per_word):
        words |= padded[:, place::per_word] << np.uint32(bits * place)
    return words.view(np.int32)
