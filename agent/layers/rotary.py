"""Rotary position embedding (Su et al. 2021): tables of cosines and sines. NumPy only, made once at the start."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from llm_serving.model.rope import RopeScaling
from llm_serving.model.shape import ModelShape

Float32Array = npt.NDArray[np.float32]


def rotary_tables(shape: ModelShape, num_positions: int) -> tuple[Float32Array, Float32Array]:
    """Cosines and sines, float32 [num_positions, head_dim], each row holding its angles twice.

    Frequencies and angles are rounded to float32 where Hugging Face rounds them, since checkpoints were trained
    with those; cosine and sine are then worked out in float64 and rounded once. YaRN's attention factor is in them.
    """
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * rotary_frequencies(shape)[None, :]
    scaling = shape.rope_scaling
    factor = np.float32(1.0 if scaling is None else scaling.attention_factor)
    if scaling is not None and scaling.type == "dynamic":
        trained = scaling.original_max_position_embeddings
        beyond = np.arange(trained, num_positions, dtype=np.float32)[:, None]
        angles[trained:] = beyond * _dynamic_frequencies(shape, scaling, num_positions)
    angles = np.concatenate([angles, angles], axis=1).astype(np.float64)
    return np.cos(angles).astype(np.float32) * factor, np.sin(angles).astype(np.float32) * factor


def rotary_frequencies(shape: ModelShape) -> Float32Array:
    """Radians a position, float32 [head_dim / 2], ``rope_scaling`` applied; ``dynamic``: in the trained context."""
    frequencies = np.float32(1.0) / _powers(shape, np.float32(shape.rope_theta))
    scaling = shape.rope_scaling
    if scaling is None or scaling.type == "dynamic":
        return frequencies
    if scaling.type == "linear":
        return frequencies / np.float32(scaling.factor)
    if scaling.type == "yarn":
        return _yarn_frequencies(shape, scaling)
    assert scaling.type == "llama3", f"ModelShape lets no other rope type through: {scaling.type}"
    return _llama3_frequencies(frequencies, scaling)


def _powers(shape: ModelShape, base: np.float32 | Float32Array) -> Float32Array:
    """``base`` to the power of 0, 2/dim, 4/dim ... : a row for each base."""
    exponents = np.arange(0, shape.head_dim, 2, dtype=np.float32) / np.float32(shape.head_dim)
    powers: Float32Array = np.power(np.asarray(base, np.float64), exponents.astype(np.float64)).astype(np.float32)
    return powers


def _dynamic_frequencies(shape: ModelShape, scaling: RopeScaling, num_positions: int) -> Float32Array:
    """Of each position from the trained context on, float32 [positions, head_dim / 2]: the base that NTK-aware scaling
    gives a sequence that ends with this very token.

    So a position is rotated as it is when its token comes alone, and never depends on how the sequence was cut or how
    long it became. transformers does the same but for a prompt beyond the trained context, all of which it rotates by
    its last position.
    """
    trained, factor, dim = scaling.original_max_position_embeddings, np.float32(scaling.factor), shape.head_dim
    lengths = np.arange(trained + 1, num_positions + 1, dtype=np.float32)
    stretch = factor * lengths / np.float32(trained) - np.float32(scaling.factor - 1)
    bases = np.float32(shape.rope_theta) * np.power(stretch, np.float32(dim / (dim - 2)))
    return np.float32(1.0) / _powers(shape, bases[:, None])


def _yarn_frequencies(shape: ModelShape, scaling: RopeScaling) -> Float32Array:
    """YaRN, section 3.2: frequencies that turn often in the trained context stay, slow ones are divided by ``factor``,
    with a ramp over the dimensions between."""
    powers = _powers(shape, np.float32(shape.rope_theta))
    low, high = (_dimension_of(turns, shape, scaling) for turns in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, shape.head_dim - 1)
    span = np.float32(high - low if high != low else 0.001)
    ramp = np.clip((np.arange(shape.head_dim // 2, dtype=np.float32) - np.float32(low)) / span, 0, 1)
    kept = np.float32(1.0) - ramp
    stretched = np.float32(1.0) / (np.float32(scaling.factor) * powers)
    blended = stretched * (np.float32(1.0) - kept) + np.float32(1.0) / powers * kept
    return np.asarray(blended, np.float32)


def _dimension_of(turns: float, shape: ModelShape, scaling: RopeScaling) -> float:
    """The dimension, not rounded, whose angle turns so often in the trained context."""
    length = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
    return shape.head_dim * math.log(length) / (2 * math.log(shape.rope_theta))


def _llama3_frequencies(frequencies: Float32Array, scaling: RopeScaling) -> Float32Array:
    """Llama 3.1: short waves stay, long ones are stretched by ``factor``, those between are blended."""
    trained = scaling.original_max_position_embeddings
    wavelengths = np.float32(2.0 * math.pi) / frequencies
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    smooth = (np.float32(trained) / wavelengths - low) / (high - low)
    stretched = frequencies / np.float32(scaling.factor)
    blended = (np.float32(1.0) - smooth) * stretched + smooth * frequencies
    is_long = wavelengths > trained / scaling.low_freq_factor
    is_short = wavelengths < trained / scaling.high_freq_factor
    return np.where(is_long, stretched, np.where(is_short, frequencies, blended)).astype(np.float32)
