"""Compares the tables of rotary cosines and sines with their definitions in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agent.layers.rotary import rotary_frequencies, rotary_tables
from llm_serving.model.rope import RopeScaling
from llm_serving.model.shape import ModelShape
from performance.models.folders import write_model
from performance.models.variants import VARIANTS

LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    folder = tmp_path_factory.mktemp("rope")
    write_model(VARIANTS["mha"], folder)
    return replace(ModelShape.from_hf_folder(folder), head_dim=128, rope_theta=500_000.0)


def exact_frequencies(shape: ModelShape) -> np.ndarray:
    return 1.0 / shape.rope_theta ** (np.arange(0, shape.head_dim, 2) / shape.head_dim)


def test_frequencies_follow_their_definition(shape: ModelShape) -> None:
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


def test_longrope_divides_by_the_length_that_the_server_accepts(shape: ModelShape) -> None:
    short, long = tuple(np.linspace(1, 2, 64)), tuple(np.linspace(1, 30, 64))
    scaling = RopeScaling(
        "longrope", 4.0, original_max_position_embeddings=100, attention_factor=1.5, short_factors=short,
        long_factors=long,
    )  # fmt: skip
    scaled = replace(shape, rope_scaling=scaling)
    exact = exact_frequencies(shape)
    for length, divisors in ((100, short), (101, long)):
        np.testing.assert_allclose(rotary_frequencies(scaled, length), exact / divisors, rtol=3e-7)
        cos, sin = rotary_tables(scaled, length)
        angles = np.arange(length)[:, None] * exact / divisors
        np.testing.assert_allclose(cos[:, :64], 1.5 * np.cos(angles), atol=2e-5)
        np.testing.assert_allclose(sin[:, 64:], 1.5 * np.sin(angles), atol=2e-5)


def test_elements_that_are_not_rotated_have_a_cosine_of_1(shape: ModelShape) -> None:
    scaling = RopeScaling("yarn", 4.0, original_max_position_embeddings=64, attention_factor=1.5)
    partial = replace(shape, partial_rotary_dim=96, rope_scaling=scaling)
    cos, sin = rotary_tables(partial, 20)
    narrow, _ = rotary_tables(replace(shape, head_dim=96, rope_scaling=scaling), 20)
    assert cos.shape == sin.shape == (20, 128)
    np.testing.assert_array_equal(cos.reshape(20, 2, 64)[:, :, :48].reshape(20, 96), narrow)
    np.testing.assert_array_equal(cos.reshape(20, 2, 64)[:, :, 48:], np.float32(1))
    np.testing.assert_array_equal(sin.reshape(20, 2, 64)[:, :, 48:], np.float32(0))


def test_each_row_has_every_angle_twice(shape: ModelShape) -> None:
    cos, sin = rotary_tables(shape, 300)
    assert cos.shape == sin.shape == (300, 128)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_array_equal(cos[:, :64], cos[:, 64:])
    angles = np.arange(300)[:, None] * exact_frequencies(shape)[None]
    np.testing.assert_allclose(cos[:, :64], np.cos(angles), atol=3e-5)
    np.testing.assert_allclose(sin[:, 64:], np.sin(angles), atol=3e-5)
    np.testing.assert_array_equal(cos[0], 1.0)


def test_dynamic_scaling_depends_only_on_the_position(shape: ModelShape) -> None:
    """Dynamic scaling (NTK-aware) changes only positions beyond the trained context.

    There, the base grows with the position.
    """
    scaled = replace(shape, rope_scaling=RopeScaling("dynamic", 4.0, original_max_position_embeddings=100))
    cos, sin = rotary_tables(scaled, 300)
    plain, _ = rotary_tables(shape, 300)
    np.testing.assert_array_equal(cos[:100], plain[:100])
    for position in (100, 101, 299):
        base = shape.rope_theta * ((4.0 * (position + 1) / 100) - 3.0) ** (128 / 126)
        angles = position / base ** (np.arange(0, 128, 2) / 128)
        np.testing.assert_allclose(cos[position, :64], np.cos(angles), atol=1e-4)
        np.testing.assert_allclose(sin[position, 64:], np.sin(angles), atol=1e-4)
    longer, _ = rotary_tables(scaled, 400)
    np.testing.assert_array_equal(longer[:300], cos)


YARN = RopeScaling("yarn", 8.0, original_max_position_embeddings=4096, attention_factor=1.25)


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones(shape: ModelShape) -> None:
    exact = exact_frequencies(shape)
    ratio = exact / rotary_frequencies(replace(shape, rope_scaling=YARN))
    turns = 4096 * exact / (2 * np.pi)
    np.testing.assert_allclose(ratio[turns > 40], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < 0.7], 8.0, rtol=1e-6)
    between = ratio[(turns <= 32) & (turns >= 1)]
    assert between.size > 5
    assert (np.diff(between) > 0).all()


def test_yarn_scales_cosines_and_sines(shape: ModelShape) -> None:
    cos, sin = rotary_tables(replace(shape, rope_scaling=YARN), 50)
    plain = rotary_tables(replace(shape, rope_scaling=replace(YARN, attention_factor=1.0)), 50)
    np.testing.assert_array_equal(cos, plain[0] * np.float32(1.25))
    np.testing.assert_array_equal(sin, plain[1] * np.float32(1.25))
    assert cos[0, 0] == np.float32(1.25)
