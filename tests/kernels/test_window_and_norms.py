"""Tests RotaryAttention with a sliding window and with norms of queries and keys.

Results are compared with the reference, and a row has equal bits in any step.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from performance.kernels.attention_calls import cache_array, read_cache, rotary_attention
from performance.kernels.calls import Array, store
from support.attention_steps import FORMATS, Sequences, Shape, check_against_float64
from support.kernel_threads import check_threads_change_no_bit

WINDOWS = [1, 5, 64, 100, 256, 300, 511]
CASES = [
    # each case: shape (heads, kv_heads, dim, block_size), and (begin, end) of each sequence in the step
    (Shape(4, 2, 6, 4), [(0, 5), (3, 3), (7, 9)]),
    (Shape(8, 2, 32, 7), [(0, 70), (129, 130)]),
    (Shape(8, 1, 64, 48), [(190, 191), (1, 367)]),
    (Shape(5, 1, 10, 5), [(250, 262), (255, 256), (256, 257)]),
    (Shape(3, 3, 34, 100), [(600, 700), (511, 513)]),
]


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("case", CASES)
def test_equals_float64(formats: tuple[str, str], window: int, case: tuple[Shape, list[tuple[int, int]]]) -> None:
    shape, parts = case
    lengths = [end for _, end in parts]
    check_against_float64(Sequences(shape, lengths, formats, window=window, norms=True), parts)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("window", [0, 5, 300])
@pytest.mark.parametrize("case", CASES)
def test_sinks_equal_float64(formats: tuple[str, str], window: int, case: tuple[Shape, list[tuple[int, int]]]) -> None:
    shape, parts = case
    made = Sequences(shape, [end for _, end in parts], formats, window=window, sinks=True)
    check_against_float64(made, parts)


@pytest.mark.parametrize("formats", FORMATS)
def test_norms_in_float32_equal_float64(formats: tuple[str, str]) -> None:
    shape, parts = CASES[1]
    made = Sequences(shape, [end for _, end in parts], formats, window=0, norms=True, float_norms=True)
    check_against_float64(made, parts)


def test_a_sink_takes_its_share_of_the_softmax() -> None:
    """A sink adds a term to the softmax's sum. If it equals the only score, the result halves. A very low sink changes
    no bit.
    """
    made = Sequences(Shape(2, 1, 16, 16), [1], ("float32", "float32"), window=0, sinks=True)
    plain = Sequences(Shape(2, 1, 16, 16), [1], ("float32", "float32"), window=0).whole()[0]
    heads = made.qkv[0].reshape(4, 16).astype(np.float64)
    made.sinks = np.float32(heads[:2] @ heads[2] * 16**-0.5)
    np.testing.assert_allclose(made.whole()[0], plain / 2, rtol=1e-5)
    made.sinks = np.full(2, -1e30, np.float32)
    np.testing.assert_array_equal(made.whole()[0], plain)


def test_the_reference_is_a_plain_rendering() -> None:
    """The kernel's reference agrees with NumPy in float64.

    NumPy computes norm, rotation, the keys of the sliding window, and softmax.
    """
    shape, length, window = Shape(4, 2, 16, 8), 40, 7
    made = Sequences(shape, [length], ("float32", "float32"), window=window, norms=True)
    [out] = made.run([(0, 0, length)], made.new_caches(), reference=True)
    heads = made.qkv[0].astype(np.float64).reshape(length, -1, shape.dim)
    assert made.gammas is not None
    normed = heads / np.sqrt((heads * heads).mean(-1, keepdims=True) + 1e-6)
    normed = np.concatenate([normed[:, :4] * made.gammas[0], normed[:, 4:6] * made.gammas[1]], 1)
    turned = np.concatenate([-normed[..., 8:], normed[..., :8]], -1)
    rotated = normed * made.cos[:length, None] + turned * made.sin[:length, None]
    for head in range(4):
        scores = rotated[:, head] @ rotated[:, 4 + head // 2].T * 16**-0.5
        distance = np.arange(length)[:, None] - np.arange(length)[None]
        weights = np.where((distance >= 0) & (distance < window), np.exp(scores - scores.max(1, keepdims=True)), 0)
        exact = weights / weights.sum(1, keepdims=True) @ heads[:, 6 + head // 2]
        np.testing.assert_allclose(out[:, 16 * head : 16 * head + 16], exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize(
    ("window", "sinks"), [*[(each, False) for each in (0, 3, 64, 200, 256, 1000)], (0, True), (64, True)]
)
def test_prefill_chunks_and_decode_agree_bit_for_bit(formats: tuple[str, str], window: int, sinks: bool) -> None:
    length = 540
    made = Sequences(Shape(6, 2, 32, 16), [length, 70], formats, window=window, norms=not sinks, sinks=sinks)
    whole = made.whole()[0]
    caches = made.new_caches()
    edges = [0, 1, 100, 163, 300, 301, 512, 530, *range(531, length + 1)]
    pieces = [made.run([(0, a, b), (1, 0, 70)], caches)[0] for a, b in pairwise(edges)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


@pytest.mark.parametrize("formats", FORMATS)
def test_threads_change_no_bit(formats: tuple[str, str]) -> None:
    made = Sequences(Shape(4, 2, 32, 16), [700], formats, window=290, norms=True)

    def run() -> list[Array]:
        caches = made.new_caches()
        made.run([(0, 0, 699)], caches)
        return made.run([(0, 699, 700)], caches)

    check_threads_change_no_bit(run, (1, 2, 5))


@pytest.mark.parametrize("formats", FORMATS)
def test_a_window_that_hides_nothing_changes_no_bit(formats: tuple[str, str]) -> None:
    plain = Sequences(Shape(4, 2, 24, 8), [300, 5], formats)
    for window in (0, 300, 10**9):
        again = Sequences(Shape(4, 2, 24, 8), [300, 5], formats, window=window)
        for one, other in zip(plain.whole(), again.whole(), strict=True):
            np.testing.assert_array_equal(one, other)


def test_keys_before_the_window_do_not_matter() -> None:
    made = Sequences(Shape(2, 1, 16, 16), [200], ("float32", "float32"), window=40)
    caches = made.new_caches()
    made.run([(0, 0, 199)], caches)
    [before] = made.run([(0, 199, 200)], (caches[0].copy(), caches[1].copy()))
    for block in made.tables[0, : 160 // 16]:
        caches[0][block] *= -3
        caches[1][block] += 7
    [after] = made.run([(0, 199, 200)], caches)
    np.testing.assert_array_equal(before, after)


def test_the_cache_holds_normed_keys() -> None:
    made = Sequences(Shape(2, 1, 16, 16), [5], ("float32", "float32"), window=0, norms=True)
    caches = made.new_caches()
    made.whole(caches)
    assert made.gammas is not None
    keys = made.qkv[0][:, 32:48].astype(np.float64)
    normed = keys / np.sqrt((keys * keys).mean(-1, keepdims=True) + 1e-6) * made.gammas[1]
    held = read_cache(caches[0], "float32", keys=True)[made.tables[0, 0], 0, :5]
    np.testing.assert_allclose(np.linalg.norm(held, axis=1), np.linalg.norm(normed, axis=1), rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": -1}, "window must be one int32, 0 for none, not below"),
        ({"gammas": (np.ones(16, np.float32), np.ones(8, np.float32))}, "argument 13 has 8 elements of float32"),
    ],
)
def test_wrong_calls_are_refused(changes: dict[str, object], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    made = Sequences(Shape(2, 1, 16, 4), [3], ("float32", "float32"), window=2)
    step = replace(made.step([(0, 0, 3)]), **changes)  # type: ignore[arg-type]
    keys: Array = cache_array(made.num_blocks, 1, 4, 16, "float32")
    assert rotary_attention(step, keys, keys.copy(), "float32")[0] == 1
    assert message in capfd.readouterr().err
    assert (keys == store(np.zeros(1), "float32")).all()
