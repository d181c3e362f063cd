"""Computes the tables of cosines and sines of the rotary position embedding (Su et al. 2021), once at the start."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from llm_serving.model.rope import RopeScaling
from llm_serving.model.shape import ModelShape

Float32Array = npt.NDArray[np.float32]


def rotary_tables(shape: ModelShape, num_positions: int) -> tuple[Float32Array, Float32Array]:
    """Returns the tables of cosines and sines, both float32 [num_positions, rotary_width].

    The two elements of a pair are rotated by the same angle, so each angle has two columns. If adjacent elements are
    rotated together (``LatentAttention.interleaved``), the two columns of an angle are adjacent. Otherwise the second
    half of a row repeats the first half.

    With partial rotary embedding, some elements of a head are not rotated. Their columns, at the end of both halves of
    a row, have cosine 1 and sine 0. The loader orders the rows of query and key weights accordingly
    (``agent/models/names.py``).

    Frequencies and angles are rounded to float32 at the same places as in transformers, because checkpoints were
    trained with these values. Cosine and sine are computed in float64 and rounded once. They include the attention
    factor of YaRN and LongRoPE.
    """
    frequencies = rotary_frequencies(shape, num_positions)
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * frequencies[None, :]
    scaling = shape.rope_scaling
    factor = np.float32(1.0 if scaling is None else scaling.attention_factor)
    if scaling is not None and scaling.type == "dynamic":
        trained = scaling.original_max_position_embeddings
        beyond = np.arange(trained, num_positions, dtype=np.float32)[:, None]
        angles[trained:] = beyond * _dynamic_frequencies(shape, scaling, num_positions)
    is_interleaved = shape.latent is not None and shape.latent.interleaved
    both = np.repeat(angles, 2, axis=1) if is_interleaved else np.concatenate([angles, angles], axis=1)
    angles = both.astype(np.float64)
    cos, sin = np.cos(angles).astype(np.float32) * factor, np.sin(angles).astype(np.float32) * factor
    return _widened(cos, shape, 1.0), _widened(sin, shape, 0.0)


def local_rotary_tables(shape: ModelShape, num_positions: int) -> tuple[Float32Array, Float32Array]:
    """Returns the cosines and sines for Gemma's layers with a window. These layers have their own base, and no scaling.
    """
    assert shape.gemma is not None, "only Gemma has two rotary embeddings"
    return rotary_tables(replace(shape, rope_theta=shape.gemma.local_rope_theta, rope_scaling=None), num_positions)


def _widened(table: Float32Array, shape: ModelShape, filler: float) -> Float32Array:
    """Widens a table of cosines or sines by columns for the elements of a head that are not rotated.

    The new columns have the value ``filler``. Each half of a row ends with one half of the new columns.
    """
    missing = (shape.rotary_width - shape.rotary_dim) // 2
    if missing == 0:
        return table
    halves = np.pad(table.reshape(len(table), 2, -1), ((0, 0), (0, 0), (0, missing)), constant_values=filler)
    return halves.reshape(len(table), -1)


def rotary_frequencies(shape: ModelShape, num_positions: int = 1) -> Float32Array:
    """Returns the rotary frequencies, float32 [rotary_dim / 2]. A frequency is the angle, in radians for each position,
    by which a pair of elements is rotated.

    The frequencies include the model's ``rope_scaling``. With ``dynamic`` scaling, they are valid within the trained
    context. With ``longrope``, they depend on ``num_positions``, the maximum length of a sequence.
    """
    frequencies = np.float32(1.0) / _powers(shape, np.float32(shape.rope_theta))
    scaling = shape.rope_scaling
    if scaling is None or scaling.type == "dynamic":
        return frequencies
    if scaling.type == "linear":
        return frequencies / np.float32(scaling.factor)
    if scaling.type == "longrope":
        return _longrope_frequencies(shape, scaling, num_positions)
    if scaling.type == "yarn":
        return _yarn_frequencies(shape, scaling)
    assert scaling.type == "llama3", f"ModelShape accepts no other rope type: {scaling.type}"
    return _llama3_frequencies(frequencies, scaling)


def _powers(shape: ModelShape, base: np.float32 | Float32Array) -> Float32Array:
    """Returns ``base`` to the powers 0, 2/d, 4/d, ... where d is ``rotary_dim``: [d / 2].

    If ``base`` is an array [bases, 1], the result is [bases, d / 2].
    """
    exponents = np.arange(0, shape.rotary_dim, 2, dtype=np.float32) / np.float32(shape.rotary_dim)
    powers: Float32Array = np.power(np.asarray(base, np.float64), exponents.astype(np.float64)).astype(np.float32)
    return powers


def _dynamic_frequencies(shape: ModelShape, scaling: RopeScaling, num_positions: int) -> Float32Array:
    """Returns the rotary frequencies of the positions after the trained context, float32 [positions, rotary_dim / 2].

    NTK-aware scaling computes a base from the length of a sequence. Here, each position uses the base for a sequence
    that ends at this position. So the rotation at a position does not depend on the chunks of a sequence or on its
    final length. In the library transformers, all positions of a prompt that is longer than the trained context use the
    base of the last position.
    """
    trained, factor, dim = scaling.original_max_position_embeddings, np.float32(scaling.factor), shape.rotary_dim
    lengths = np.arange(trained + 1, num_positions + 1, dtype=np.float32)
    stretch = factor * lengths / np.float32(trained) - np.float32(scaling.factor - 1)
    bases = np.float32(shape.rope_theta) * np.power(stretch, np.float32(dim / (dim - 2)))
    return np.float32(1.0) / _powers(shape, bases[:, None])


def _yarn_frequencies(shape: ModelShape, scaling: RopeScaling) -> Float32Array:
    """Returns the rotary frequencies of YaRN (Peng et al. 2023, section 3.2).

    High frequencies, with many rotations within the trained context, do not change. Low frequencies, with few
    rotations, are divided by ``factor``. In between, there is a gradual transition.
    """
    powers = _powers(shape, np.float32(shape.rope_theta))
    low, high = (_dimension_of(turns, shape, scaling) for turns in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, shape.rotary_dim - 1)
    span = np.float32(high - low if high != low else 0.001)
    ramp = np.clip((np.arange(shape.rotary_dim // 2, dtype=np.float32) - np.float32(low)) / span, 0, 1)
    kept = np.float32(1.0) - ramp
    stretched = np.float32(1.0) / (np.float32(scaling.factor) * powers)
    blended = stretched * (np.float32(1.0) - kept) + np.float32(1.0) / powers * kept
    return np.asarray(blended, np.float32)


def _longrope_frequencies(shape: ModelShape, scaling: RopeScaling, num_positions: int) -> Float32Array:
    """Returns the rotary frequencies of LongRoPE (Ding et al. 2024). Each frequency is divided by its own divisor from
    the config.

    If a sequence can become longer than the trained context, all positions use the long divisors, else the short
    divisors. If the choice depended on the current length of a sequence, cached keys would become wrong when the
    sequence grows.
    """
    is_long = num_positions > scaling.original_max_position_embeddings
    divisors = np.array(scaling.long_factors if is_long else scaling.short_factors, np.float32)
    return np.float32(1.0) / (divisors * _powers(shape, np.float32(shape.rope_theta)))


def _dimension_of(turns: float, shape: ModelShape, scaling: RopeScaling) -> float:
    """Returns the index of the head dimension whose angle makes ``turns`` rotations within the trained context.

    The index need not be an integer.
    """
    length = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
    return shape.rotary_dim * math.log(length) / (2 * math.log(shape.rope_theta))


def _llama3_frequencies(frequencies: Float32Array, scaling: RopeScaling) -> Float32Array:
    """Returns the rotary frequencies of Llama 3.1.

    High frequencies do not change, low frequencies are divided by ``factor``, and frequencies in between are
    interpolated.
    """
    trained = scaling.original_max_position_embeddings
    wavelengths = np.float32(2.0 * math.pi) / frequencies
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    smooth = (np.float32(trained) / wavelengths - low) / (high - low)
    stretched = frequencies / np.float32(scaling.factor)
    blended = (np.float32(1.0) - smooth) * stretched + smooth * frequencies
    is_long = wavelengths > trained / scaling.low_freq_factor
    is_short = wavelengths < trained / scaling.high_freq_factor
    return np.where(is_long, stretched, np.where(is_short, frequencies, blended)).astype(np.float32)
