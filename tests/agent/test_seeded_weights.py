"""Tests the generator of random weights. Its numbers follow its documentation and must never change."""

from __future__ import annotations

import hashlib
import statistics

import numpy as np
import pytest

from agent.weights import WeightPart, WeightSpec, load_weights, open_weights
from agent.weights.seeded import CHUNK_ELEMENTS, DUMMY_STD, fill_seeded, normal_table
from agent.weights.storage import Array, allocate, from_float32, to_float32

PINNED = ["-0.007451", "-0.003416", "-0.006004", "-0.009931"]


def filled(name: str, shape: tuple[int, ...], dtype: str = "float32", seed: int = 0, std: float = DUMMY_STD) -> Array:
    array = allocate(shape, dtype)
    fill_seeded(name, array, dtype, seed=seed, std=std)
    return array


def by_the_text(name: str, count: int, seed: int) -> np.ndarray:
    """Returns the same random numbers as the generator, computed from its documentation."""
    inverse_cdf = statistics.NormalDist().inv_cdf
    chunks = []
    for chunk in range(-(-count // 2**20)):
        size = min(2**20, count - chunk * 2**20)
        digest = hashlib.sha256(f"{seed}/{name}/{chunk}".encode()).digest()[:16]
        words = np.random.SFC64(int.from_bytes(digest, "little")).random_raw(-(-size // 4))
        indices = np.array([[int(word) >> shift & 0xFFFF for shift in (0, 16, 32, 48)] for word in words[:64]])
        chunks.append(indices.reshape(-1)[:size])
    return np.float32(0.02) * np.array(
        [np.float32(inverse_cdf((i + 0.5) / 65536)) for i in np.concatenate(chunks)], np.float32
    )


def test_values_follow_the_description() -> None:
    np.testing.assert_array_equal(
        filled("model.a.weight", (3, 70), seed=5).reshape(-1), by_the_text("model.a.weight", 210, 5)
    )


def test_first_values_are_pinned() -> None:
    first = filled("model.layers.0.mlp.up_proj.weight", (2, 4), seed=0).reshape(-1)
    assert [f"{value:.6f}" for value in first[:4]] == PINNED


def test_each_chunk_has_its_own_seed() -> None:
    long = filled("w", (CHUNK_ELEMENTS + 5,))
    short = filled("w", (7,))
    np.testing.assert_array_equal(long[:7], short)
    assert not np.array_equal(long[CHUNK_ELEMENTS:], short[:5])


def test_values_are_normally_distributed() -> None:
    array = filled("w", (512, 512), std=0.5)
    assert abs(float(array.mean())) < 0.004
    assert float(array.std()) == pytest.approx(0.5, abs=0.003)
    assert float((np.abs(array) < 0.5).mean()) == pytest.approx(0.6827, abs=0.004)
    assert len(normal_table()) == 65536


def test_values_depend_on_name_and_seed() -> None:
    first = filled("a", (64,))
    np.testing.assert_array_equal(first, filled("a", (8, 8)).reshape(-1))
    assert not np.array_equal(first, filled("b", (64,)))
    assert not np.array_equal(first, filled("a", (64,), seed=1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_round_the_float32_values(dtype: str) -> None:
    np.testing.assert_array_equal(filled("a", (100,), dtype), from_float32(filled("a", (100,)), dtype))


def test_norms_are_ones() -> None:
    assert to_float32(filled("model.norm.weight", (5,), "bfloat16"), "bfloat16").tolist() == [1.0] * 5


def test_a_joined_parameter_contains_its_parts() -> None:
    spec = WeightSpec("qkv", (WeightPart("q", (4, 3)), WeightPart("k", (2, 3))))
    weights = load_weights([spec], open_weights(None, [spec], seed=9), "float32", lambda done, of: None)
    np.testing.assert_array_equal(
        weights["qkv"], np.concatenate([filled("q", (4, 3), seed=9), filled("k", (2, 3), seed=9)])
    )
