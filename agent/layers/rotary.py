"""Rotary position embedding (Su et al. 2021): tables of cosines and sines. NumPy only, made once at the start."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from llm_serving.model_shape import ModelShape, RopeScaling

Float32Array = npt.NDArray[np.float32]


def rotary_tables(shape: ModelShape, num_positions: int) -> tuple[Float32Array, Float32Array]:
    """Cosines and sines, float32 [num_positions, head_dim], each row holding its angles twice.

    Frequencies and angles are rounded to float32 where Hugging Face rounds them, since checkpoints were trained
    with those; cosine and sine are then worked out in float64 and rounded once.
    """
    frequencies = rotary_frequencies(shape)
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * frequencies[None, :]
    angles = np.concatenate([angles, angles], axis=1).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotary_frequencies(shape: ModelShape) -> Float32Array:
    """Radians a position, float32 [head_dim / 2], ``rope_scaling`` applied."""
    exponents = np.arange(0, shape.head_dim, 2, dtype=np.float32) / np.float32(shape.head_dim)
    powers = np.power(shape.rope_theta, exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1.0) / powers
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.type == "linear":
        return frequencies / np.float32(scaling.factor)
    assert scaling.type == "llama3", f"ModelShape lets no other rope type through: {scaling.type}"
    return _llama3_frequencies(frequencies, scaling)


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
