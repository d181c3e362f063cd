"""Tests linear layers over packed weights.

Results are compared with the scalar reference, with NumPy, and with the same row in other batches.

The program test_library.py runs these tests again for every instruction set. The program test_linear_formats.py
compares the bits of the instruction sets.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from performance.kernels.calls import DTYPES, Array, load, store
from performance.kernels.linear_calls import linear, linear_best, packed
from support.kernel_calls import EPSILON, random_tensor
from support.kernel_threads import check_threads_change_no_bit

INTEGERS = ("int8", "int8_weight_only", "int4", "int4_weight_only")
FORMATS = [*((dtype, dtype) for dtype in DTYPES), *((fmt, dtype) for fmt in INTEGERS for dtype in DTYPES)]
"""Weight format and type of the activations."""

# each case: rows, columns, depth, group size (of integer formats), gated, asymmetric
SHAPES = [
    (1, 1, 1, 0, False, False),
    (1, 64, 64, 64, False, False),
    (2, 1, 9, 8, False, True),
    (3, 65, 77, 0, False, False),
    (4, 30, 31, 0, True, False),
    (7, 130, 200, 32, False, False),
    (13, 62, 100, 32, True, True),
    (33, 100, 136, 64, True, False),
    (70, 66, 51, 24, False, True),
    (1, 130, 192, 0, False, False),
    (21, 66, 128, 0, True, False),
    (70, 200, 1088, 0, False, False),
]


def operands(fmt: str, dtype: str, shape: tuple[int, int, int, int, bool, bool]) -> tuple[Array, Array, Array]:
    """Returns random activations, weights and packed weights. SHAPES describes ``shape``."""
    rows, columns, depth, group, gated, asymmetric = shape
    rng = np.random.default_rng(depth)
    x, w = random_tensor(rng, (rows, depth), dtype), random_tensor(rng, (columns, depth), dtype)
    group = group if fmt in INTEGERS else 0
    return x, w, packed(fmt, w, group=group, gated=gated, asymmetric=asymmetric, source_dtype=dtype)


def swiglu(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    gate, up = np.split(values, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize(("fmt", "dtype"), FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(fmt: str, dtype: str, shape: tuple[int, int, int, int, bool, bool]) -> None:
    x, w, blob = operands(fmt, dtype, shape)
    for epilogue in ("store", "store_float", *(["swiglu"] if shape[4] else [])):
        out_dtype = "float32" if epilogue == "store_float" else dtype
        result = linear(x, blob, dtype, epilogue=epilogue)
        reference = linear(x, blob, dtype, epilogue=epilogue, mode="reference")
        np.testing.assert_array_equal(linear(x, blob, dtype, epilogue=epilogue, mode="quantized"), result)
        if fmt in ("int8", "int4") and epilogue != "swiglu":
            np.testing.assert_array_equal(result, reference)
            continue
        scale = np.abs(load(x, dtype)) @ np.abs(load(w, dtype)).T
        scale = scale.max() * (np.abs(load(reference, out_dtype)).max() + 1 if epilogue == "swiglu" else 1)
        limit = 2 * EPSILON[out_dtype] * np.abs(load(reference, out_dtype)) + 4e-6 * scale
        assert (np.abs(load(result, out_dtype) - load(reference, out_dtype)) <= limit).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_float_formats_equal_float64(dtype: str, shape: tuple[int, int, int, int, bool, bool]) -> None:
    x, w, blob = operands(dtype, dtype, shape)
    exact = load(x, dtype) @ load(w, dtype).T
    magnitude = np.abs(load(x, dtype)) @ np.abs(load(w, dtype)).T
    result = load(linear(x, blob, dtype), dtype)
    assert (np.abs(result - exact) <= EPSILON[dtype] * np.abs(exact) * 1.001 + 2e-6 * magnitude).all()
    if shape[4]:
        gated = load(linear(x, blob, dtype, epilogue="swiglu"), dtype)
        assert (np.abs(gated - swiglu(exact)) <= 2 * EPSILON[dtype] * np.abs(gated) + 1e-4 * magnitude.max()).all()


@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize(
    ("fmt", "relative"), [("int8", 0.02), ("int8_weight_only", 0.015), ("int4", 0.2), ("int4_weight_only", 0.2)]
)
def test_quantised_formats_are_near_float64(fmt: str, relative: float, group: int) -> None:
    x, w, blob = operands(fmt, "float32", (9, 70, 512, group, False, False))
    exact = load(x, "float32") @ load(w, "float32").T
    error = linear(x, blob, "float32") - exact
    assert np.sqrt((error**2).mean()) <= relative * np.sqrt((exact**2).mean())


def test_integers_and_zero_points_are_taken_as_they_are() -> None:
    rng = np.random.default_rng(6)
    x = np.float32(rng.integers(-127, 128, (5, 96)))
    x[:, 0] = 127  # the largest input is 127, so the scale of every row is 1
    scales = np.float32(2.0 ** rng.integers(-3, 3, (40, 3)))
    for fmt in ("int8", "int4", "int4_weight_only"):
        low, high, stored = (-128, 128, np.int8) if fmt == "int8" else (0, 16, np.uint8)
        codes = rng.integers(low, high, (40, 96)).astype(stored)
        zeros = None if fmt == "int8" else rng.integers(0, 17, (40, 3)).astype(np.uint8)
        offset = 0 if zeros is None else np.repeat(zeros.astype(np.int64), 32, axis=1)
        values = (codes.astype(np.int64) - offset) * np.repeat(scales, 32, axis=1)
        blob = packed(fmt, codes, group=32, scales=scales, zeros=zeros)
        np.testing.assert_array_equal(linear(x, blob, "float32"), x.astype(np.float64) @ values.T)


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize(
    ("depth", "group"),
    [(96, 32), (192, 64), (288, 96), (384, 128), (160, 64), (512, 256), (1120, 32), (3072, 64), (2560, 1280)],
)
def test_groups_have_the_bits_of_the_reference(fmt: str, depth: int, group: int) -> None:
    """With AMX, many rows use tiles of 64 or 32 depths, and few rows use vectors. Long depths are divided into chunks.
    With AVX2, integer sums of groups up to 256 have the bits of floats, which is exact only up to 2^22.

    The weights and the inputs have their largest and smallest numbers. Some scales are 0, and one row has a NaN. The
    memory after the last row has NaNs. All forms must have the bits of the scalar reference.
    """
    rng, groups = np.random.default_rng(depth), -(-depth // group)
    low, high, stored = (-128, 128, np.int8) if fmt == "int8" else (0, 16, np.uint8)
    codes = rng.integers(low, high, (70, depth)).astype(stored)
    codes[:20], codes[20:40] = low, high - 1
    zeros = None if fmt == "int8" else rng.integers(0, 17, (70, groups)).astype(np.uint8)
    scales = np.float32(rng.standard_normal((70, groups)) * (rng.random((70, groups)) < 0.8))
    blob = packed(fmt, codes, group=group, scales=scales, zeros=zeros)
    x = np.full((39, depth), np.nan, np.float32)
    x[:37] = rng.standard_normal((37, depth))
    x[:5], x[5:9], x[9] = 3, -3, 0
    x[36, 1] = np.nan
    result = linear(x[:37], blob, "float32")
    np.testing.assert_array_equal(result, linear(x[:37], blob, "float32", mode="reference"))
    assert np.isnan(result[36]).all()
    assert not np.isnan(result[:36]).any()
    for begin, end in [(0, 1), (0, 7), (1, 9), (2, 17), (3, 19), (4, 37)]:
        np.testing.assert_array_equal(linear(x[begin:end], blob, "float32"), result[begin:end])


@pytest.mark.parametrize(("fmt", "dtype"), FORMATS)
@pytest.mark.parametrize("depth", [48, 1061, 1088])
def test_a_row_does_not_depend_on_the_batch(fmt: str, dtype: str, depth: int) -> None:
    x, _, blob = operands(fmt, dtype, (71, 70, depth, 32 if depth == 48 else 0, False, False))
    whole = linear(x, blob, dtype)
    # The last steps have 1 to 17 rows, so tiles of all heights occur.
    for begin, end in [(70, 71), (7, 24), (1, 66), *((9, 9 + rows) for rows in range(1, 18))]:
        np.testing.assert_array_equal(linear(x[begin:end].copy(), blob, dtype), whole[begin:end])


@pytest.mark.parametrize(("fmt", "dtype"), [("bfloat16", "bfloat16"), ("int8", "float32"), ("int4", "bfloat16")])
@pytest.mark.parametrize("depth", [12800, 13000])
def test_pieces_of_the_depth_change_no_bit(fmt: str, dtype: str, depth: int) -> None:
    """Each output has a long sum, which the kernel computes in several pieces.

    Between two pieces, the sums wait in memory. A row has the same bits in every batch.
    """
    x, _, blob = operands(fmt, dtype, (27, 64, depth, 64 if fmt == "int4" else 0, False, False))
    whole = linear(x, blob, dtype)
    reference = load(linear(x[:2], blob, dtype, mode="reference"), dtype)
    np.testing.assert_allclose(load(whole[:2], dtype), reference, rtol=1e-2, atol=0.1)
    for begin, end in [(0, 1), (5, 13), (6, 19), (3, 19), (20, 27)]:
        np.testing.assert_array_equal(linear(x[begin:end].copy(), blob, dtype), whole[begin:end])


@pytest.mark.parametrize(("fmt", "dtype"), [(fmt, "bfloat16") for fmt in ("bfloat16", *INTEGERS)])
@pytest.mark.parametrize("depth", [768, 3072])
def test_blocks_of_rows_change_no_bit(fmt: str, dtype: str, depth: int) -> None:
    """With AMX tiles, a row may be in any block of rows, and its inputs may be summed in several chunks.

    A row has the same bits in every batch.
    """
    x, _, blob = operands(fmt, dtype, (530, 134, depth, 64 if fmt.startswith("int4") else 0, True, False))
    for epilogue in ("store", "swiglu"):
        whole = linear(x, blob, dtype, epilogue=epilogue)
        for begin, end in [(0, 1), (16, 33), (100, 420), (529, 530)]:
            part = linear(x[begin:end].copy(), blob, dtype, epilogue=epilogue)
            np.testing.assert_array_equal(part, whole[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(
    ("depth", "group"), [(320, 32), (320, 64), (320, 96), (320, 128), (320, 256), (320, 0), (328, 40)]
)
@pytest.mark.parametrize("fmt", ["int8_weight_only", "int4_weight_only"])
def test_groups_of_weights_alone(fmt: str, depth: int, group: int, asymmetric: bool, dtype: str) -> None:
    """Tests weight-only formats with different sizes of quantisation groups.

    Groups are smaller or larger than the part that the kernel unpacks at a time. The last group may be short. Some
    sizes are no multiple of a tile.
    """
    x, w, blob = operands(fmt, dtype, (53, 150, depth, group, False, asymmetric))
    result = linear(x, blob, dtype, epilogue="store_float")
    reference = linear(x, blob, dtype, epilogue="store_float", mode="reference")
    magnitude = np.abs(load(x, dtype)) @ np.abs(load(w, dtype)).T
    assert (np.abs(result - reference) <= 4e-6 * magnitude.max()).all()
    for begin, end in [(0, 1), (52, 53), (3, 19), (3, 20), (0, 33), (10, 50)]:
        part = linear(x[begin:end].copy(), blob, dtype, epilogue="store_float")
        np.testing.assert_array_equal(part, result[begin:end])


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(
    ("fmt", "group"), [("int8_weight_only", 0), ("int8_weight_only", 64), ("int4_weight_only", 64)]
)
def test_denormal_sums_are_the_same_in_every_batch(fmt: str, group: int, asymmetric: bool) -> None:
    """The sums of nearly cancelling bfloat16 products are denormal, and the matrix unit replaces them by zeros.

    Large scales make this visible in the result. The bits must not depend on the batch.
    """
    rng = np.random.default_rng(group)
    x = store(3e-38 * rng.standard_normal((19, 256)).astype(np.float32), "bfloat16")
    w = np.float32(1e30) * random_tensor(rng, (130, 256), "float32")
    blob = packed(fmt, w, group=group, asymmetric=asymmetric)
    whole = linear(x, blob, "bfloat16", epilogue="store_float")
    for row in range(len(x)):
        part = linear(x[row : row + 1].copy(), blob, "bfloat16", epilogue="store_float")
        np.testing.assert_array_equal(part.view(np.uint32), whole[row : row + 1].view(np.uint32))


@pytest.mark.parametrize(("fmt", "dtype"), FORMATS)
def test_threads_change_no_bit(fmt: str, dtype: str) -> None:
    x, _, blob = operands(fmt, dtype, (300, 200, 256, 32, False, False))
    check_threads_change_no_bit(lambda: [linear(x, blob, dtype)], (1, 1, 2, 2, 3, 3))


@pytest.mark.parametrize(("fmt", "dtype"), FORMATS)
@pytest.mark.parametrize("rows", [5, 12, 33, 64])
def test_threads_that_share_panels_change_no_bit(fmt: str, dtype: str, rows: int) -> None:
    x, _, blob = operands(fmt, dtype, (rows, 7 * 64, 512, 32, False, False))  # 7 panels

    def run() -> list[Array]:
        out = np.full((rows, 7 * 64), np.nan, np.float32)
        return [linear(x, blob, dtype, out=out, epilogue="store_float")]

    check_threads_change_no_bit(run, (1, 2, 3, 4, 5, 11))


@pytest.mark.parametrize(("fmt", "dtype"), FORMATS)
@pytest.mark.parametrize("depth", [40, 37])
def test_strided_rows_in_and_out(fmt: str, dtype: str, depth: int) -> None:
    x, _, blob = operands(fmt, dtype, (6, 70, depth, 0, False, False))
    wide_x, wide_out = np.full((6, depth + 11), 7, x.dtype), np.full((6, 83), 5, x.dtype)
    wide_x[:, 3 : 3 + depth] = x
    linear(wide_x[:, 3 : 3 + depth], blob, dtype, out=wide_out[:, 2:72])
    np.testing.assert_array_equal(wide_out[:, 2:72], linear(x, blob, dtype))
    assert (wide_out[:, :2] == 5).all()
    assert (wide_out[:, 72:] == 5).all()


@pytest.mark.parametrize(("fmt", "dtype"), FORMATS)
def test_the_largest_of_each_row_is_found(fmt: str, dtype: str) -> None:
    x, w, _ = operands(fmt, dtype, (37, 200, 48, 0, False, False))
    w[150:180] = w[20:50]  # equal columns give ties, and the lowest index must win
    blob = packed(fmt, w, source_dtype=dtype)
    for mode in ("kernel", "reference"):
        out, ids, values = linear_best(x, blob, dtype, mode=mode)
        np.testing.assert_array_equal(ids, out.argmax(1))
        np.testing.assert_array_equal(values, out.max(1))


def test_the_largest_takes_zeros_as_equal() -> None:
    w = np.float32([[0], [-1], [2], [2]])
    for mode in ("kernel", "reference"):
        _, ids, values = linear_best(np.float32([[1], [-1], [0], [-0.0]]), packed("float32", w), "float32", mode=mode)
        np.testing.assert_array_equal(ids, [2, 1, 0, 0])
        np.testing.assert_array_equal(values, np.float32([2, 1, 0, 0]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 15, 16, 63, 64, 199])
def test_a_row_with_a_value_that_is_not_finite_has_no_largest(bad: float, column: int) -> None:
    """If a row's product has a value that is not finite, its best id is -1 and its best value is NaN.

    The column of this value does not matter, and other rows are not affected.
    """
    w = np.random.default_rng(5).standard_normal((200, 2)).astype(np.float32)
    w[column, 1] = bad
    blob = packed("float32", w)
    x = np.float32([[1, 0], [0, 1], [2, 0], [0, -1]])
    x[:, 1] = [0, 1, 0, 1]
    w[column, 1] = 0  # rows 0 and 2 get this weight, because their input 0 times infinity would be NaN
    clean = packed("float32", w)
    for mode in ("kernel", "reference"):
        _, ids, values = linear_best(x[1::2], blob, "float32", mode=mode)
        assert ids.tolist() == [-1, -1]
        assert np.isnan(values).all()
        out, ids, _ = linear_best(x[::2], clean, "float32", mode=mode)
        np.testing.assert_array_equal(ids, out.argmax(1))


@pytest.mark.parametrize(("fmt", "dtype"), FORMATS)
def test_infinity_and_nan_stay_in_their_row(fmt: str, dtype: str) -> None:
    x, _, blob = operands(fmt, dtype, (6, 70, 40, 8, False, False))
    clean = linear(x, blob, dtype)
    nan, inf = {"float32": (np.nan, np.inf), "float16": (np.nan, np.inf), "bfloat16": (0x7FC0, 0x7F80)}[dtype]
    x[2, 3], x[4, 39] = nan, inf
    dirty = linear(x, blob, dtype)
    assert np.isnan(load(dirty[2], dtype)).all()
    assert not np.isfinite(load(dirty[4], dtype)).any()
    np.testing.assert_array_equal(dirty[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])


@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_a_row_of_zeros_gives_zeros(fmt: str) -> None:
    x, _, blob = operands(fmt, "float32", (3, 70, 40, 8, False, True))
    x[1] = 0
    assert (linear(x, blob, "float32")[1] == 0).all()
