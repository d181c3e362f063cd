"""Makes random sequences for tests of RotaryAttention, and runs steps that compute chosen parts of these sequences with
a KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from performance.kernels.attention_calls import AttentionStep, cache_array, rotary_attention
from performance.kernels.calls import Array, load, store
from support.kernel_calls import random_tensor

FORMATS = [
    ("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"),
    ("float32", "int8"), ("float16", "int8"), ("bfloat16", "int8"),
]  # fmt: skip
"""Pairs of element types: of the activations, and of the KV cache."""
TOLERANCE = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Maximum absolute error of an output, compared with float64."""
INT8_TOLERANCE = 4e-4
"""Maximum absolute error with an int8 cache, where queries have 15 bits and softmax weights 15 or 16."""


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    block_size: int

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


class Sequences:
    """Random queries, keys and values of some sequences. Their cache blocks are in random order."""

    def __init__(
        self, shape: Shape, lengths: list[int], formats: tuple[str, str], *, seed: int = 5, window: int | None = None,
        norms: bool = False, float_norms: bool = False, sinks: bool = False,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.window = window
        self.gamma_dtype = "float32" if float_norms else formats[0]
        gammas = [store(1 + rng.standard_normal(shape.dim) / 8, self.gamma_dtype) for _ in range(2)]
        self.gammas = (gammas[0], gammas[1]) if norms else None
        self.sinks = np.float32(np.random.default_rng(seed).uniform(-2, 4, shape.heads)) if sinks else None
        self.shape, self.lengths, (self.dtype, self.cache_dtype) = shape, lengths, formats
        self.qkv = [random_tensor(rng, (length, shape.width), self.dtype) for length in lengths]
        counts = [-(-length // shape.block_size) for length in lengths]
        self.num_blocks = sum(counts) + 2
        order = rng.permutation(self.num_blocks).astype(np.int32)
        self.tables = np.zeros((len(lengths), max([1, *counts])), np.int32)
        used = 0
        for seq, count in enumerate(counts):
            self.tables[seq, :count] = order[used : used + count]
            used += count
        rows = max([1, *lengths])
        angles = np.arange(rows)[:, None] / 10000.0 ** (np.arange(0, shape.dim, 2) / shape.dim)
        angles = np.concatenate([angles, angles], 1).astype(np.float32)
        self.cos, self.sin = np.cos(angles), np.sin(angles)

    def new_caches(self) -> tuple[Array, Array]:
        """Returns key and value caches that are full of NaN.

        A read of a slot that was never written then shows in the result.
        """
        return self._nan_cache(), self._nan_cache()

    def _nan_cache(self) -> Array:
        shape = self.shape
        cache = cache_array(self.num_blocks, shape.kv_heads, shape.block_size, shape.dim, self.cache_dtype)
        if self.cache_dtype != "int8":
            cache[:] = store(np.full(cache.shape, np.nan, np.float32), self.dtype)
            return cache
        scales = cache.reshape(self.num_blocks, shape.kv_heads, -1)[..., shape.block_size * shape.dim :]
        scales[:] = np.full((self.num_blocks, shape.kv_heads, shape.block_size), np.nan, np.float32).view(np.int8)
        return cache

    def slots(self, seq: int, begin: int, end: int) -> npt.NDArray[np.int32]:
        positions = np.arange(begin, end)
        block = self.tables[seq, positions // self.shape.block_size]
        return (block * self.shape.block_size + positions % self.shape.block_size).astype(np.int32)

    def step(self, parts: list[tuple[int, int, int]]) -> AttentionStep:
        """Makes a step that computes ``parts``.

        Each part is (sequence, begin, end), with the positions from begin to end.
        """
        none = [np.zeros(0, np.int32)]
        return AttentionStep(
            qkv=np.concatenate([np.zeros((0, self.shape.width), self.qkv[0].dtype)]
                               + [self.qkv[seq][begin:end] for seq, begin, end in parts]),
            positions=np.concatenate(none + [np.arange(b, e, dtype=np.int32) for _, b, e in parts]),
            cos=self.cos,
            sin=self.sin,
            slot_mapping=np.concatenate(none + [self.slots(*part) for part in parts]),
            block_tables=self.tables[[seq for seq, _, _ in parts]].copy(),
            context_lens=np.array([end for _, _, end in parts], np.int32),
            query_lens=np.array([end - begin for _, begin, end in parts], np.int32),
            dtype=self.dtype,
            window=self.window,
            gammas=self.gammas,
            gamma_dtype=self.gamma_dtype,
            sinks=self.sinks,
        )  # fmt: skip

    def run(
        self, parts: list[tuple[int, int, int]], caches: tuple[Array, Array], *, write: bool = True,
        reference: bool = False,
    ) -> list[Array]:  # fmt: skip
        """Runs a step and returns the output rows of each part.

        If ``write`` is false, the step writes no keys and values, so the caches must already contain them.
        """
        step = self.step(parts)
        if not write:
            step.slot_mapping[:] = -1
        code, out = rotary_attention(step, *caches, self.cache_dtype, reference=reference)
        assert code == 0
        ends = np.cumsum([end - begin for _, begin, end in parts])
        return np.split(out, ends[:-1])

    def whole(self, caches: tuple[Array, Array] | None = None) -> list[Array]:
        """Computes every sequence in one step from position 0."""
        return self.run([(seq, 0, n) for seq, n in enumerate(self.lengths)], caches or self.new_caches())


def check_against_float64(made: Sequences, parts: list[tuple[int, int]]) -> None:
    """Checks the results of a step against the float64 reference over the same caches.

    ``parts`` has (begin, end) of each sequence. An earlier step computes the positions before ``begin``.
    """
    caches = made.new_caches()
    made.run([(seq, 0, begin) for seq, (begin, _) in enumerate(parts)], caches)
    step = [(seq, begin, end) for seq, (begin, end) in enumerate(parts)]
    outs = made.run(step, caches)
    exact = made.run(step, caches, write=False, reference=True)
    tolerance = max(TOLERANCE[made.dtype], INT8_TOLERANCE if made.cache_dtype == "int8" else 0)
    for out, wanted in zip(outs, exact, strict=True):
        np.testing.assert_allclose(load(out, made.dtype), load(wanted, made.dtype), rtol=0, atol=tolerance)
