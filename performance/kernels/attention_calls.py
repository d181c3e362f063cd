"""Calls custom ops, mainly RotaryAttention, with NumPy arrays in the form in which MindSpore passes tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.kernels.library import load_library
from agent.weights.storage import allocate
from llm_serving.model.number_formats import kv_format
from performance.kernels.calls import Array, load
from performance.kernels.library import load_testing_library

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

_GROUP_KEYS = 16


def cache_array(num_blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: str) -> Array:
    """Allocates a zeroed key or value cache as an agent does. ``dtype`` is "int8" or a float type.

    agent/kernels/ops/rotary_attention.h describes the layout. In an int8 cache, the memory of one head in one block has
    all values first and then all scales.
    """
    cache = allocate((num_blocks, kv_heads, block_size, kv_format(dtype).head_width(head_dim)), dtype)
    cache.fill(0)
    return cache


def read_cache(cache: Array, dtype: str, *, keys: bool) -> npt.NDArray[np.float64]:
    """Returns the numbers in a key or value cache as float64 [num_blocks, kv_heads, block_size, head_dim].

    ``keys`` is True for a key cache, because keys and values have different layouts.
    """
    if dtype != "int8":
        return load(_in_rows(cache, keys) if dtype == "bfloat16" else cache, dtype)
    blocks, heads, block_size, width = cache.shape
    chunks = cache.reshape(blocks, heads, block_size * width)
    held = chunks[..., : block_size * (width - 4)].reshape(blocks, heads, block_size, width - 4)
    values = _in_rows(held, keys)
    scales = chunks[..., block_size * (width - 4) :].copy().view(np.float32)
    return values.astype(np.float64) * scales[..., None].astype(np.float64)


def _in_rows(cache: Array, keys: bool) -> Array:
    """Returns a copy of a cache in row-major order: [num_blocks, kv_heads, block_size, head_dim].

    If block size and head size are multiples of ``_GROUP_KEYS``, the kernels store the elements in another order. They
    keep 4 bytes (2 bfloat16 or 4 int8) together as a unit. They also flip the sign bit of int8 keys. This function
    reverses both changes. For other sizes, the cache already has row-major order and is returned itself.
    """
    blocks, heads, block_size, dim = cache.shape
    if block_size % _GROUP_KEYS or dim % _GROUP_KEYS:
        return cache
    per, groups = 4 // cache.itemsize, block_size // _GROUP_KEYS
    if keys:
        units = cache.reshape(blocks, heads, groups, dim // per, _GROUP_KEYS, per).transpose(0, 1, 2, 4, 3, 5)
        rows = units.reshape(cache.shape)
        return (rows.view(np.uint8) ^ np.uint8(128)).view(np.int8) if cache.dtype == np.int8 else rows
    return cache.reshape(blocks, heads, block_size // per, dim, per).swapaxes(3, 4).reshape(cache.shape)


@dataclass
class AttentionStep:
    """The arguments of a call of RotaryAttention, except the caches and the counts of tokens, sequences and blocks.

    As in an agent, the arrays may have more elements than the step uses. The counts give the number of used elements.
    """

    qkv: Array
    """Queries, keys and values: [rows, (heads + 2 * kv_heads) * head_dim]."""
    positions: Int32Array
    cos: Float32Array
    """Cosines of the rotary embedding: [positions, head_dim]. ``sin`` has the same shape."""
    sin: Float32Array
    slot_mapping: Int32Array
    block_tables: Int32Array
    """Block numbers [sequences, blocks per sequence], or the same numbers as one flat array."""
    context_lens: Int32Array
    query_lens: Int32Array
    dtype: str
    window: int | None = None
    """Number of positions of a sliding window. 0 means that there is no window. With None, the call has no argument for
    the window. The op must treat this like 0.
    """
    gammas: tuple[Array, Array] | None = None
    """Weights of the norms of queries and keys, [head_dim] each. ``window`` must not be None if there are ``gammas``.
    """
    epsilon: float = 1e-6
    gamma_dtype: str | None = None
    """Type of ``gammas``. None means ``dtype``."""
    sinks: Float32Array | None = None
    """Attention sinks: each query head has one additional score, to which no value belongs. They require a ``window``
    and no ``gammas``.
    """


def rotary_attention(
    step: AttentionStep, key_cache: Array, value_cache: Array, cache_dtype: str, *, counts: Sequence[int] | None = None,
    reference: bool = False, out: Array | None = None,
) -> tuple[int, Array]:  # fmt: skip
    """Runs the custom op RotaryAttention, or its scalar reference. Both write new keys and values to the caches.

    Returns the op's error code (0: success) and its output [rows of ``step.qkv``, heads * head_dim]. ``counts`` are the
    numbers of tokens, sequences, and blocks per sequence that the op uses. By default the op uses the whole arrays.
    """
    heads_width = step.qkv.shape[1] - 2 * key_cache.shape[1] * step.cos.shape[1]
    if out is None:
        out = np.full((step.qkv.shape[0], max(heads_width, 0)), 77, step.qkv.dtype)
    if counts is None:
        counts = (step.qkv.shape[0], len(step.query_lens), step.block_tables.shape[-1])
    counts_array = np.array([*counts, 0], np.int32)
    tensors = [
        (step.qkv, step.dtype), (step.positions, None), (step.cos, None), (step.sin, None),
        (key_cache, cache_dtype), (value_cache, cache_dtype), (step.slot_mapping, None), (step.block_tables, None),
        (step.context_lens, None), (step.query_lens, None), (counts_array, None), *_window_and_norms(step),
        (out, step.dtype),
    ]  # fmt: skip
    call = EntryCall(tensors)
    if reference:
        return call.run(load_testing_library().llmk_reference_rotary_attention), out
    return call.run(load_library().RotaryAttention), out


def _window_and_norms(step: AttentionStep) -> list[tuple[Array, str | None]]:
    tensors: list[tuple[Array, str | None]] = []
    if step.window is not None:
        tensors.append((np.array([step.window], np.int32), None))
    if step.sinks is not None:
        tensors.append((step.sinks, None))
    if step.gammas is not None:
        tensors += [(gamma, step.gamma_dtype or step.dtype) for gamma in step.gammas]
        tensors.append((np.array([step.epsilon], np.float32), None))
    return tensors


class EntryCall:
    """A prepared call of a custom op. It holds the arguments in the form in which MindSpore passes tensors.

    Benchmarks prepare a call once and run it many times.
    """

    def __init__(self, tensors: Sequence[tuple[Array, str | None]]) -> None:
        count = len(tensors)
        self._arrays = [array for array, _ in tensors]
        for array in self._arrays:
            assert array.flags.c_contiguous
        self._count = count
        self._params = (ctypes.c_void_p * count)(*[array.ctypes.data for array in self._arrays])
        self._ndims = (ctypes.c_int * count)(*[array.ndim for array in self._arrays])
        shapes = [(ctypes.c_int64 * max(array.ndim, 1))(*array.shape) for array in self._arrays]
        self._shapes = (ctypes.POINTER(ctypes.c_int64) * count)(
            *[ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)) for shape in shapes]
        )
        self._dtypes = (ctypes.c_char_p * count)(*[(name or array.dtype.name).encode() for array, name in tensors])
        self._keep_alive = shapes

    def run(self, entry: Any) -> int:
        """Calls the C function ``entry`` of a custom op. Returns 0, or its error code."""
        return int(entry(self._count, self._params, self._ndims, self._shapes, self._dtypes, None, None))
