"""Tests RotaryAttention. Results are compared with float64.

A row has equal bits for every cache layout, batch and number of threads.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from performance.kernels.attention_calls import read_cache, rotary_attention
from performance.kernels.calls import Array, load
from support.attention_steps import FORMATS, Sequences, Shape, check_against_float64
from support.kernel_threads import check_threads_change_no_bit

CASES = [
    # each case: shape (heads, kv_heads, dim, block_size), and (begin, end) of each sequence in the step
    (Shape(1, 1, 2, 1), [(0, 1)]),
    (Shape(1, 1, 16, 16), [(0, 3)]),
    (Shape(4, 2, 6, 4), [(0, 5), (3, 3), (7, 9)]),
    (Shape(4, 4, 64, 16), [(0, 1), (63, 64), (64, 65)]),
    (Shape(8, 2, 32, 7), [(0, 70), (129, 130)]),
    (Shape(6, 2, 38, 128), [(167, 200), (0, 4)]),
    (Shape(8, 1, 128, 3), [(190, 191), (1, 67)]),
    (Shape(14, 2, 80, 48), [(128, 129), (131, 140)]),
    (Shape(5, 1, 10, 5), [(250, 262), (255, 256), (256, 257)]),
    (Shape(7, 1, 66, 64), [(0, 33)]),
    (Shape(2, 1, 16, 16), [(1999, 2000)]),
    (Shape(3, 3, 34, 100), [(600, 700), (511, 513)]),
    # In these steps, the kernel puts the query rows of several key-value heads into one block of rows. Some numbers of
    # heads do not divide the block evenly.
    (Shape(30, 3, 64, 16), [(500, 501), (270, 271), (0, 1)]),
    (Shape(32, 2, 64, 16), [(500, 501), (270, 271)]),
    (Shape(32, 4, 64, 16), [(500, 501), (255, 256), (66, 67)]),
    (Shape(30, 5, 32, 48), [(500, 501), (383, 384)]),
    (Shape(12, 12, 64, 16), [(500, 501), (256, 258)]),
]

LAYOUTS = [Shape(4, 2, 24, 4), Shape(4, 2, 24, 16), Shape(4, 2, 48, 32), Shape(4, 2, 64, 16)]
"""Layouts of the cache. With the last two, narrow caches store units of 4 bytes. With the last one, whole groups are
written together.
"""


def written(cache: Array, cache_dtype: str, *, keys: bool) -> np.ndarray:
    return np.nan_to_num(read_cache(cache, cache_dtype, keys=keys))


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_equals_float64(formats: tuple[str, str], case: tuple[Shape, list[tuple[int, int]]]) -> None:
    shape, parts = case
    check_against_float64(Sequences(shape, [end for _, end in parts], formats), parts)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("shape", LAYOUTS)
def test_the_reference_writes_the_same_cache(formats: tuple[str, str], shape: Shape) -> None:
    made = Sequences(shape, [39], formats)
    caches, copies = made.new_caches(), made.new_caches()
    made.whole(caches)
    made.run([(0, 0, 39)], copies, reference=True)
    # Rounding may go either way if a value is halfway between two numbers. The largest value is below 4.
    unit = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2, "int8": 4 / 127}[formats[1]]
    for cache, copy, keys in zip(caches, copies, (True, False), strict=True):
        held = [written(which, formats[1], keys=keys) for which in (cache, copy)]
        np.testing.assert_allclose(held[0], held[1], rtol=0, atol=unit)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("shape", LAYOUTS)
def test_the_cache_holds_rotated_keys_and_plain_values(formats: tuple[str, str], shape: Shape) -> None:
    length = 39
    made = Sequences(shape, [length], formats)
    caches = made.new_caches()
    made.whole(caches)
    heads = load(made.qkv[0], formats[0]).reshape(length, -1, shape.dim)
    turned = np.concatenate([-heads[..., shape.dim // 2 :], heads[..., : shape.dim // 2]], -1)
    rotated = heads * made.cos[:length, None] + turned * made.sin[:length, None]
    slots = made.slots(0, 0, length)
    for cache, exact, keys in zip(caches, (rotated[:, 4:6], heads[:, 6:8]), (True, False), strict=True):
        held = read_cache(cache, formats[1], keys=keys)[slots // shape.block_size, :, slots % shape.block_size]
        largest = np.abs(exact).max(-1, keepdims=True)
        error = {"float32": 2e-7, "float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 0.5001 / 127}[formats[1]]
        assert (np.abs(held - exact) <= error * largest + 1e-7).all()


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize(
    "shape",
    [Shape(4, 4, 48, 16), Shape(8, 2, 64, 16), Shape(7, 1, 20, 5), Shape(12, 4, 128, 128), Shape(10, 10, 64, 32)],
)
def test_prefill_chunks_and_decode_agree_bit_for_bit(formats: tuple[str, str], shape: Shape) -> None:
    length = 270  # the context is longer than one partition of 256 keys
    made = Sequences(shape, [length], formats)
    caches = made.new_caches()
    [whole] = made.whole(caches)
    for position in (0, 1, 15, 63, 64, 65, 127, 128, 255, 256, 257, 269):
        [out] = made.run([(0, position, position + 1)], (caches[0].copy(), caches[1].copy()))
        np.testing.assert_array_equal(out[0], whole[position])
    for chunk in (29, 100, 256):
        parts = made.new_caches()
        begin = 0
        for end in [*range(chunk, length, chunk), length]:
            [out] = made.run([(0, begin, end)], parts)
            np.testing.assert_array_equal(out, whole[begin:end])
            begin = end
        for cache, part in zip(caches, parts, strict=True):
            np.testing.assert_array_equal(cache.view(np.uint8), part.view(np.uint8))


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("dim", [24, 64])
def test_block_size_changes_no_bit(formats: tuple[str, str], dim: int) -> None:
    [wanted] = Sequences(Shape(4, 2, dim, 32), [300], formats).whole()
    sizes = (1, 2, 5, 16, 48, 63, 64, 65, 127, 128)
    outs = {size: Sequences(Shape(4, 2, dim, size), [300], formats).whole()[0] for size in sizes}
    assert [size for size, out in outs.items() if not np.array_equal(out, wanted)] == []


@pytest.mark.parametrize("formats", FORMATS)
def test_a_sequence_does_not_depend_on_the_batch_or_its_order(formats: tuple[str, str]) -> None:
    parts = [(89, 90), (0, 5), (4, 4), (0, 1), (65, 105), (63, 64), (530, 540), (600, 601)]
    made = Sequences(Shape(4, 2, 32, 8), [end for _, end in parts], formats)
    caches = made.new_caches()
    made.run([(seq, 0, begin) for seq, (begin, _) in enumerate(parts)], caches)
    step = [(seq, begin, end) for seq, (begin, end) in enumerate(parts)]
    whole = made.run(step, (caches[0].copy(), caches[1].copy()))
    for order in (step[::-1], step[3:] + step[:3]):
        outs = made.run(order, (caches[0].copy(), caches[1].copy()))
        for (seq, _, _), out in zip(order, outs, strict=True):
            np.testing.assert_array_equal(out, whole[seq])
    for part in step:
        [alone] = made.run([part], (caches[0].copy(), caches[1].copy()))
        np.testing.assert_array_equal(alone, whole[part[0]])


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("parts", [[(0, 100), (299, 300), (128, 129)], [(1500, 1501)], [(700, 703)]])
def test_threads_change_no_bit(formats: tuple[str, str], parts: list[tuple[int, int]]) -> None:
    made = Sequences(Shape(8, 4, 32, 16), [end for _, end in parts], formats)
    caches = made.new_caches()
    made.run([(seq, 0, begin) for seq, (begin, _) in enumerate(parts)], caches)
    step = [(seq, begin, end) for seq, (begin, end) in enumerate(parts)]
    check_threads_change_no_bit(lambda: made.run(step, (caches[0].copy(), caches[1].copy())), (1, 2, 3, 8))


@pytest.mark.parametrize("formats", FORMATS)
def test_blocks_of_another_sequence_of_the_same_step_are_read_as_written(formats: tuple[str, str]) -> None:
    """A sequence may read prefix blocks that another sequence writes in the same step.

    It must read the written values.
    """
    made = Sequences(Shape(4, 2, 16, 4), [8, 9], formats)
    made.qkv[1][:8] = made.qkv[0]
    [_, wanted] = made.whole()
    made.tables[1, :2] = made.tables[0, :2]
    [_, out] = made.run([(0, 0, 8), (1, 8, 9)], made.new_caches())
    np.testing.assert_array_equal(out, wanted[8:])


def test_only_the_counted_rows_are_touched() -> None:
    made = Sequences(Shape(4, 2, 16, 4), [5, 7], ("float32", "float32"))
    [first, second] = made.whole()
    step = made.step([(0, 0, 5), (1, 0, 7)])
    long = replace(
        step,
        qkv=np.concatenate([step.qkv, np.full((4, step.qkv.shape[1]), np.nan, np.float32)]),
        positions=np.concatenate([step.positions, np.full(4, -1, np.int32)]),
        slot_mapping=np.concatenate([step.slot_mapping, np.full(4, 10**6, np.int32)]),
        block_tables=np.concatenate([step.block_tables.reshape(-1), np.full(5, -1, np.int32)]),
        context_lens=np.concatenate([step.context_lens, np.full(3, -1, np.int32)]),
        query_lens=np.concatenate([step.query_lens, np.full(3, -1, np.int32)]),
    )
    code, out = rotary_attention(long, *made.new_caches(), "float32", counts=(12, 2, 2))
    assert code == 0
    np.testing.assert_array_equal(out[:12], np.concatenate([first, second]))
    assert (out[12:] == 77).all()
    code, out = rotary_attention(long, *made.new_caches(), "float32", counts=(0, 0, 0))
    assert code == 0
    assert (out == 77).all()


def test_rows_past_the_last_sequence_become_zero_and_negative_slots_write_nothing() -> None:
    made = Sequences(Shape(4, 2, 16, 4), [5], ("float32", "float32"))
    caches = made.new_caches()
    [whole] = made.whole(caches)
    step = made.step([(0, 0, 5)])
    again = replace(
        step, qkv=np.concatenate([step.qkv, step.qkv * 0]), positions=np.tile(step.positions, 2),
        slot_mapping=np.full(10, -1, np.int32),
    )  # fmt: skip
    before = caches[0].copy(), caches[1].copy()
    code, out = rotary_attention(again, *caches, "float32")
    assert code == 0
    np.testing.assert_array_equal(out[:5], whole)
    assert (out[5:] == 0).all()
    for cache, copy in zip(caches, before, strict=True):
        np.testing.assert_array_equal(cache, copy)


@pytest.mark.parametrize("formats", FORMATS)
def test_large_scores_do_not_overflow(formats: tuple[str, str]) -> None:
    made = Sequences(Shape(2, 2, 32, 16), [400], formats)
    made.qkv[0] = made.qkv[0].copy()
    if formats[0] == "bfloat16":
        made.qkv[0] = np.where(made.qkv[0] & 0x7FFF, made.qkv[0] + np.uint16(6 << 7), made.qkv[0]).astype(np.uint16)
    else:
        made.qkv[0] *= np.array(64, made.qkv[0].dtype)
    [out] = made.whole()
    assert np.isfinite(load(out, formats[0])).all()


class TestRefusals:
    """If an operator refuses its inputs, it prints one line on standard error and writes no result."""

    made = Sequences(Shape(2, 1, 16, 4), [3], ("float32", "float32"))

    def refused(self, code: int, capfd: pytest.CaptureFixture[str], counts: tuple[int, ...] | None = None,
                cache_dtype: str = "float32", **changes: object) -> str:  # fmt: skip
        step = replace(self.made.step([(0, 0, 3)]), **changes)  # type: ignore[arg-type]
        caches = self.made.new_caches()
        before = caches[0].copy()
        out = np.full((3, 32), 77, np.float32)
        assert rotary_attention(step, *caches, cache_dtype, counts=counts, out=out)[0] == code
        assert (out == 77).all()
        np.testing.assert_array_equal(caches[0], before)
        np.testing.assert_array_equal(caches[1], before)
        return capfd.readouterr().err

    @pytest.mark.parametrize(
        ("changes", "code", "message"),
        [
            ({"query_lens": [4]}, 1, "sequence 0 has 4 queries and 3 keys; it needs 0 <= queries <= keys"),
            ({"query_lens": [-1]}, 1, "sequence 0 has -1 queries and 3 keys"),
            ({"query_lens": [4], "context_lens": [4]}, 1, "the query lengths sum to 4; the step has 3 tokens"),
            ({"context_lens": [5]}, 1, "context_lens[0] is 5; block_tables of width 1 and block_size 4 hold 4"),
            ({"slot_mapping": [0, 1, 12]}, 2, "slot_mapping[2] is 12; it must be from 0 to 11"),
            ({"positions": [0, 3, 1]}, 2, "positions[1] is 3; it must be from 0 to 2"),
            ({"positions": [0, -1, 1]}, 2, "positions[1] is -1; it must be from 0 to 2"),
            ({"block_tables": [[3]]}, 2, "block_tables[0] is 3; it must be from 0 to 2"),
            ({"block_tables": [[-1]]}, 2, "block_tables[0] is -1; it must be from 0 to 2"),
        ],
    )
    def test_values(self, changes: dict[str, list[int]], code: int, message: str,
                    capfd: pytest.CaptureFixture[str]) -> None:  # fmt: skip
        arrays = {name: np.array(value, np.int32) for name, value in changes.items()}
        assert f"llm_kernels: RotaryAttention: {message}" in self.refused(code, capfd, **arrays)

    @pytest.mark.parametrize(
        ("counts", "code", "message"),
        [
            ((4, 1, 1), 2, "counts[0] is 4; it must be from 0 to 3"),
            ((3, 2, 1), 2, "counts[1] is 2; it must be from 0 to 1"),
            ((3, 1, 2), 1, "counts asks for 1 block tables of width 2; block_tables has 1 entries"),
        ],
    )
    def test_counts(self, counts: tuple[int, ...], code: int, message: str, capfd: pytest.CaptureFixture[str]) -> None:
        assert message in self.refused(code, capfd, counts)

    def test_types(self, capfd: pytest.CaptureFixture[str]) -> None:
        error = self.refused(1, capfd, cache_dtype="float16")
        assert "key_cache is float16 and value_cache float16; both must be int8 or float32 as qkv" in error
        error = self.refused(1, capfd, positions=np.zeros(3, np.int64))
        assert "argument 1 is int64; it must be int32" in error
        error = self.refused(1, capfd, dtype="float64")
        assert "qkv is float64 and the output float64; both must be the same one of" in error

    def test_shapes(self, capfd: pytest.CaptureFixture[str]) -> None:
        error = self.refused(1, capfd, qkv=np.zeros((3, 60), np.float32))
        assert "qkv has width 60; with 1 kv heads of size 16 it must be (heads + 2 * kv_heads) * head_dim" in error
        error = self.refused(1, capfd, cos=np.zeros((3, 8), np.float32), sin=np.zeros((3, 8), np.float32))
        assert "cos rows have 8 elements, cos 24, sin 24; head_dim is 16" in error
