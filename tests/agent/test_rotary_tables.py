"""Cosines and sines against the definitions, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agent.layers.rotary import rotary_frequencies, rotary_tables
from llm_serving.model_shape import ModelShape, RopeScaling
from tools.seeded_model import VARIANTS, write_model

LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    folder = tmp_path_factory.mktemp("rope")
    write_model(VARIANTS["mha"], folder)
    return replace(ModelShape.from_hf_folder(folder), head_dim=128, rope_theta=500_000.0)


def exact_frequencies(shape: ModelShape) -> np.ndarray:
    return 1.0 / shape.rope_theta ** (np.arange(0, shape.head_dim, 2) / shape.head_dim)


def test_frequencies(shape: ModelShape) -> None:
    np.testing.assert_allclose(rotary_frequencies(shape), exact_frequencies(shape), rtol=2e-7)


def test_linear_scaling_divides(shape: ModelShape) -> None:
    scaled = rotary_frequencies(replace(shape, rope_scaling=RopeScaling("linear", 4.0)))
    np.testing.assert_allclose(scaled, exact_frequencies(shape) / 4, rtol=2e-7)


def test_llama3_keeps_short_waves_and_stretches_long_ones(shape: ModelShape) -> None:
    exact = exact_frequencies(shape)
    ratio = exact / rotary_frequencies(replace(shape, rope_scaling=LLAMA3))
    wavelength = 2 * np.pi / exact
    np.testing.assert_allclose(ratio[wavelength < 8192 / 4], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[wavelength > 8192], 8.0, rtol=1e-6)
    between = ratio[(wavelength >= 8192 / 4) & (wavelength <= 8192)]
    assert between.size > 0
    assert (np.diff(between) > 0).all()
    smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
    blended = 1.0 / ((1 - smooth) / 8 + smooth)
    np.testing.assert_allclose(between, blended[(wavelength >= 8192 / 4) & (wavelength <= 8192)], rtol=1e-5)


def test_tables_hold_every_angle_twice(shape: ModelShape) -> None:
    cos, sin = rotary_tables(shape, 300)
    assert cos.shape == sin.shape == (300, 128)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_array_equal(cos[:, :64], cos[:, 64:])
    angles = np.arange(300)[:, None] * exact_frequencies(shape)[None]
    np.testing.assert_allclose(cos[:, :64], np.cos(angles), atol=3e-5)
    np.testing.assert_allclose(sin[:, 64:], np.sin(angles), atol=3e-5)
    np.testing.assert_array_equal(cos[0], 1.0)
