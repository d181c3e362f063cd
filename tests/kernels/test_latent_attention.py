"""Tests the custom operator LatentAttention.

The reference in float64 expands the keys and values of every head. Chunks and threads must change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from agent.kernels.library import load_library, set_threads
from performance.kernels.attention_calls import EntryCall
from performance.kernels.calls import Array, load, store
from performance.kernels.linear_calls import packed
from support.kernel_threads import threads_as_before
from support.sweeps import with_sweeps

BLOCK_SIZE, EPSILON = 16, 1e-6
TOLERANCE = {"float32": 2e-5, "float16": 2e-2, "bfloat16": 1e-1}


@dataclass(frozen=True)
class Sizes:
    """Sizes of latent attention. ``query_rank`` is 0 if queries have no low-rank projection."""

    heads: int = 3
    query_rank: int = 40
    nope: int = 24
    rope: int = 8
    value: int = 20
    rank: int = 48
    interleaved: bool = True
    tokens: int = 300

    @property
    def head_dim(self) -> int:
        return self.nope + self.rope

    @property
    def first(self) -> int:
        return self.query_rank or self.heads * self.head_dim


DEEPSEEK_V3 = Sizes(heads=128, query_rank=0, nope=128, rope=64, value=128, rank=512, tokens=20)
"""The sizes of DeepSeek-V3. A task has space for the 128 rows of one token, but not for those of two tokens."""


class Latent:
    """Random weights of latent attention, and a random sequence of tokens.

    Runs the operator, and computes the exact result.
    """

    def __init__(self, sizes: Sizes, dtype: str) -> None:
        self.sizes, self.dtype = sizes, dtype
        self.rng = rng = np.random.default_rng(5)
        s, width = sizes, sizes.first + sizes.rank + sizes.rope
        self.joined = store(rng.standard_normal((s.tokens, width)), dtype)
        self.gamma = store(1 + rng.standard_normal(s.rank) / 8, dtype)
        self.query_gamma = store(1 + rng.standard_normal(s.query_rank) / 8, dtype)
        self.key_up = store(rng.standard_normal((s.heads, s.nope, s.rank)) / s.nope**0.5, dtype)
        self.value_up = store(rng.standard_normal((s.heads, s.value, s.rank)) / s.rank**0.5, dtype)
        query = rng.standard_normal((s.heads * s.head_dim, s.query_rank))
        self.query = store(query / max(s.query_rank, 1) ** 0.5, dtype)
        angles = np.outer(np.arange(s.tokens), 1 / 100.0 ** (np.arange(s.rope // 2) / s.rope))
        both = np.repeat(angles, 2, axis=1) if s.interleaved else np.concatenate([angles, angles], axis=1)
        self.cos, self.sin = np.cos(both).astype(np.float32), np.sin(both).astype(np.float32)
        self.scale = np.float32(1.3 / s.head_dim**0.5)
        num_blocks = -(-s.tokens // BLOCK_SIZE) + 3
        self.table = rng.permutation(np.arange(1, num_blocks)).astype(np.int32)[: -(-s.tokens // BLOCK_SIZE)]
        cache = np.full((num_blocks, BLOCK_SIZE, s.rank + s.rope), np.nan)
        self.cache = store(cache, dtype)
        self.blobs = [self._stacked(self.key_up.swapaxes(1, 2)), self._stacked(self.value_up)]

    def _stacked(self, weights: Array) -> Array:
        blobs = [packed(self.dtype, np.ascontiguousarray(each), source_dtype=self.dtype) for each in weights]
        stride = -(-max(blob.size for blob in blobs) // 64) * 64
        raw = np.zeros(stride * len(blobs) + 64, np.uint8)
        out = raw[-raw.ctypes.data % 64 :][: stride * len(blobs)]
        for index, blob in enumerate(blobs):
            out[index * stride : index * stride + blob.size] = blob
        return out

    def run(self, begin: int, end: int, *, form: list[int] | None = None) -> tuple[int, Array]:
        """Runs the operator for the tokens of the sequence from ``begin`` to ``end``.

        Earlier calls must have run the tokens before ``begin``. ``form`` replaces the sizes that are passed to the
        operator.
        """
        s, count = self.sizes, end - begin
        positions = np.arange(begin, end, dtype=np.int32)
        slots = self.table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        out = store(np.full((count + 2, s.heads * s.value), 7.0), self.dtype)
        joined = np.concatenate([self.joined[begin:end], self.joined[:2]])
        form = form or [s.heads, s.query_rank, s.nope, s.value, int(s.interleaved)]
        tensors = [
            (joined, self.dtype), (np.array(form, np.int32), None), (np.array([EPSILON, self.scale], np.float32), None),
            (positions, None), (self.cos, None), (self.sin, None), (self.cache, self.dtype),
            (slots.astype(np.int32), None), (self.table, None), (np.array([end], np.int32), None),
            (np.array([count], np.int32), None), (np.array([count, 1, len(self.table), 0], np.int32), None),
            (self.gamma, self.dtype), (self.blobs[0], None), (self.blobs[1], None),
        ]  # fmt: skip
        if s.query_rank:
            query = packed(self.dtype, self.query, source_dtype=self.dtype)
            tensors += [(self.query_gamma, self.dtype), (query, None)]
        code = EntryCall([*tensors, (out, self.dtype)]).run(load_library().LatentAttention)
        assert (load(out[count:], self.dtype) == 7).all(), "rows after those of the step"
        return code, out[:count]

    def _rotated(self, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Applies the rotary embedding to x [tokens, ..., rotary dim]."""
        half = x.shape[-1] // 2
        shape = (len(x), *[1] * (x.ndim - 2), half)
        pick = slice(0, None, 2) if self.sizes.interleaved else slice(0, half)
        cos, sin = (each[:, pick].astype(np.float64).reshape(shape) for each in (self.cos, self.sin))
        other = slice(1, None, 2) if self.sizes.interleaved else slice(half, None)
        out = np.empty_like(x)
        out[..., pick] = x[..., pick] * cos - x[..., other] * sin
        out[..., other] = x[..., other] * cos + x[..., pick] * sin
        return out

    def _normed(self, x: npt.NDArray[np.float64], gamma: Array) -> npt.NDArray[np.float64]:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * load(gamma, self.dtype)

    def exact(self) -> npt.NDArray[np.float64]:
        """Returns the attention over the keys and values of every head, as the model defines them, in float64."""
        s, joined = self.sizes, load(self.joined, self.dtype)
        queries = joined[:, : s.first]
        if s.query_rank:
            queries = self._normed(queries, self.query_gamma) @ load(self.query, self.dtype).T
        queries = queries.reshape(s.tokens, s.heads, s.head_dim)
        latent = self._normed(joined[:, s.first : s.first + s.rank], self.gamma)
        rotated = self._rotated(joined[:, s.first + s.rank :])
        keys = np.einsum("tr,hnr->thn", latent, load(self.key_up, self.dtype))
        values = np.einsum("tr,hvr->thv", latent, load(self.value_up, self.dtype))
        scores = np.einsum("qhn,khn->hqk", queries[..., : s.nope], keys)
        scores += np.einsum("qhr,kr->hqk", self._rotated(queries[..., s.nope :]), rotated)
        scores = np.where(np.tri(s.tokens, dtype=bool), scores * float(self.scale), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        found: npt.NDArray[np.float64] = np.einsum("hqk,khv->qhv", weights, values).reshape(s.tokens, -1)
        return found


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "sizes", [Sizes(), Sizes(query_rank=0), Sizes(interleaved=False, heads=1)], ids=["rank", "plain", "halves"]
)
def test_equals_float64(dtype: str, sizes: Sizes) -> None:
    made = Latent(sizes, dtype)
    code, out = made.run(0, sizes.tokens)
    assert code == 0
    np.testing.assert_allclose(load(out, dtype), made.exact(), rtol=0, atol=TOLERANCE[dtype])


CHUNKED = {"rank": Sizes(), "plain": Sizes(query_rank=0), "deepseek_v3": DEEPSEEK_V3}


@pytest.mark.parametrize(
    ("name", "dtype"),
    with_sweeps(
        [(name, dtype) for name in CHUNKED for dtype in ("float32", "float16", "bfloat16")],
        lambda name, dtype: name == "deepseek_v3" and dtype != "bfloat16",
    ),
)
def test_chunks_and_threads_change_no_bit(name: str, dtype: str) -> None:
    """A prompt gives the same bits in one step, in chunks and token by token.

    Its last tokens read more than one partition of keys.
    """
    sizes = CHUNKED[name]
    _, whole = Latent(sizes, dtype).run(0, sizes.tokens)
    ends = [1, 2, 7, sizes.tokens - 3, sizes.tokens - 2, sizes.tokens - 1, sizes.tokens]
    with threads_as_before():
        for threads in (1, 3):
            set_threads(threads)
            made, begin = Latent(sizes, dtype), 0
            for end in ends:
                code, out = made.run(begin, end)
                assert code == 0
                np.testing.assert_array_equal(out, whole[begin:end], err_msg=f"{threads} threads, to {end}")
                begin = end


def test_deepseeks_sizes_equal_float64() -> None:
    made = Latent(DEEPSEEK_V3, "float32")
    _, out = made.run(0, DEEPSEEK_V3.tokens)
    np.testing.assert_allclose(load(out, "float32"), made.exact(), rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ([3, 40, 24, 21, 1], "must be 96 and 63"),
        ([0, 40, 24, 20, 1], "heads and sizes must be positive"),
        ([3, 0, 24, 20, 1], "with this form there are 16"),
        ([2, 40, 24, 30, 1], "argument 13"),
    ],
)
def test_wrong_arguments_are_refused(form: list[int], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    made = Latent(Sizes(tokens=4), "float32")
    code, out = made.run(0, 4, form=form)
    assert code == 1
    assert message in capfd.readouterr().err
    assert (out == 7).all()
