"""Compares MatMul with float64. A row has the same bits for other numbers of rows and threads."""

from __future__ import annotations

import numpy as np
import pytest

from performance.kernels.calls import DTYPES, load, matmul
from support.kernel_calls import EPSILON, random_tensor
from support.kernel_threads import check_threads_change_no_bit

SHAPES = [
    (1, 1, 1),
    (1, 7, 16),
    (3, 5, 15),
    (4, 6, 17),
    (5, 13, 33),
    (2, 64, 130),
    (67, 25, 96),
    (9, 31, 1100),
    (65, 97, 300),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_float64_within_the_rounding_of_its_sums(dtype: str, shape: tuple[int, int, int]) -> None:
    rows, columns, depth = shape
    rng = np.random.default_rng(1)
    x, w = random_tensor(rng, (rows, depth), dtype), random_tensor(rng, (columns, depth), dtype)
    exact = load(x, dtype) @ load(w, dtype).T
    magnitude = np.abs(load(x, dtype)) @ np.abs(load(w, dtype)).T
    limit = EPSILON[dtype] * np.abs(exact) * 1.001 + 2e-6 * magnitude
    assert (np.abs(load(matmul(x, w, dtype), dtype) - exact) <= limit).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [48, 1061, 4100])
def test_a_row_does_not_depend_on_the_batch(dtype: str, depth: int) -> None:
    rng = np.random.default_rng(2)
    x, w = random_tensor(rng, (71, depth), dtype), random_tensor(rng, (45, depth), dtype)
    whole = matmul(x, w, dtype)
    for begin, end in [(0, 1), (70, 71), (3, 5), (3, 6), (0, 4), (10, 15), (7, 24), (0, 64), (1, 66)]:
        np.testing.assert_array_equal(matmul(x[begin:end].copy(), w, dtype), whole[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_column_does_not_depend_on_its_neighbours(dtype: str) -> None:
    rng = np.random.default_rng(3)
    x, w = random_tensor(rng, (9, 530), dtype), random_tensor(rng, (29, 530), dtype)
    whole = matmul(x, w, dtype)
    for begin, end in [(0, 1), (28, 29), (2, 5), (1, 29), (4, 14)]:
        np.testing.assert_array_equal(matmul(x, w[begin:end].copy(), dtype), whole[:, begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype: str) -> None:
    rng = np.random.default_rng(4)
    x, w = random_tensor(rng, (130, 512), dtype), random_tensor(rng, (200, 512), dtype)
    check_threads_change_no_bit(lambda: [matmul(x, w, dtype)], (1, 1, 2, 2, 3, 3))


def test_infinity_and_nan_stay_in_their_row() -> None:
    rng = np.random.default_rng(5)
    x, w = random_tensor(rng, (6, 40), "float32"), random_tensor(rng, (8, 40), "float32")
    clean = matmul(x, w, "float32")
    x[2, 3], x[4, 39] = np.nan, np.inf
    dirty = matmul(x, w, "float32")
    assert np.isnan(dirty[2]).all()
    assert np.isinf(dirty[4]).all()
    np.testing.assert_array_equal(dirty[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])
