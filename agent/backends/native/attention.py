"""Implements rotary embedding and attention of the native op table with MindSpore's primitives."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops.auto_generate import (
    ApplyRotaryPosEmb,
    FlashAttentionScore,
    PagedAttention,
    ReshapeAndCache,
    RmsNorm,
    SplitWithSize,
)

from agent.backends.base import AttentionForm
from agent.backends.native.integer_cache import GatheredBlocks, IntegerCache, MultipliedOut
from agent.layers.parameter import MINDSPORE_DTYPES, as_tensor
from agent.weights.storage import Array, from_float32

_ROTATE_HALVES = 2
"""Value of the argument ``cos_format`` of ApplyRotaryPosEmb. With this value, the primitive rotates pairs of elements
that are half a head apart. Its inputs cos and sin have one row for each token of the step.
"""
_MASK_SIZE = 128
"""Size of the causal mask of attention without a window."""
_BAND_MASK_SIZE = 2048
"""Size of the compressed mask that ``sparse_mode`` 4 requires."""
_BAND = 4
"""Value of ``sparse_mode`` for a band: a query attends to ``pre_tokens`` tokens before it and ``next_tokens`` after it.
"""
_MASKED = -10000.0
"""The number that a mask adds to the scores of masked positions. The bfloat16 mask of FlashAttentionScore has 0 and 1
instead.
"""


def causal_mask(form: AttentionForm, dtype: str) -> Tensor:
    """Makes FlashAttentionScore's causal mask: a triangle of fixed size, which the primitive uses for every length."""
    size, masked = (_MASK_SIZE, 1.0 if dtype == "bfloat16" else _MASKED) if form.window == 0 else (_BAND_MASK_SIZE, 1.0)
    return Tensor(np.triu(np.ones((size, size), np.float32), 1) * masked, MINDSPORE_DTYPES[dtype])


def no_mask(dtype: str) -> Tensor:
    """Makes a placeholder, which PagedAttention takes as its mask in steps where every sequence has one token."""
    return Tensor(np.zeros((1, 1)), MINDSPORE_DTYPES[dtype])


class Rotary(nn.Cell):
    """Returns cos and sin of each token, both [tokens, head_size] in the model's type, for ``positions`` [tokens]."""

    def __init__(self, cos: Array, sin: Array, dtype: str) -> None:
        super().__init__()
        self.cos = _constant(from_float32(cos, dtype), "cos")
        self.sin = _constant(from_float32(sin, dtype), "sin")
        self.gather = ops.Gather()

    def construct(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.gather(self.cos, positions, 0), self.gather(self.sin, positions, 0)


class RotaryAndMask(nn.Cell):
    """Returns cos and sin of each token, and the mask of an attention window."""

    def __init__(self, rotary: nn.Cell, mask: nn.Cell) -> None:
        super().__init__()
        self.rotary, self.mask = rotary, mask

    def construct(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = self.rotary(positions)
        return cos, sin, self.mask(positions)


class WindowMask(nn.Cell):
    """Makes a mask [tokens, max_positions] for an attention window from ``positions`` [tokens].

    The mask is 0 for a position that the token may attend to, else ``_MASKED``.
    """

    def __init__(self, max_positions: int, dtype: str, window: int) -> None:
        super().__init__()
        self.window = window
        self.columns = Tensor(np.arange(max_positions, dtype=np.int32)[None])
        self.reshape, self.cast = ops.Reshape(), ops.Cast()
        self.at_most, self.above, self.either = ops.LessEqual(), ops.Greater(), ops.LogicalOr()
        self.dtype = MINDSPORE_DTYPES[dtype]

    def construct(self, positions: Tensor) -> Tensor:
        rows = self.reshape(positions, (-1, 1))
        too_old = self.at_most(self.columns, rows - self.window)
        hidden = self.either(too_old, self.above(self.columns, rows))
        return self.cast(hidden, self.dtype) * _MASKED


class ChunkMask(nn.Cell):
    """Makes PagedAttention's mask [tokens, positions] for steps in which a sequence has several tokens.

    The mask is 0 for a position that the token may attend to, else ``_MASKED``. In bfloat16, PagedAttention of latent
    vectors (``of_latent``) takes 0 for these positions and 1 for all others.
    """

    def __init__(self, max_positions: int, dtype: str, *, of_latent: bool) -> None:
        super().__init__()
        self.columns = Tensor(np.arange(max_positions, dtype=np.int32)[None])
        masked = 1.0 if of_latent and dtype == "bfloat16" else _MASKED
        self.masked = Tensor(masked, MINDSPORE_DTYPES[dtype])
        self.dtype = MINDSPORE_DTYPES[dtype]
        self.reshape, self.greater, self.cast, self.multiply = ops.Reshape(), ops.Greater(), ops.Cast(), ops.Mul()

    def construct(self, positions: Tensor) -> Tensor:
        hidden = self.greater(self.columns, self.reshape(positions, (-1, 1)))
        return self.multiply(self.cast(hidden, self.dtype), self.masked)


class Attention(nn.Cell):
    """Splits qkv, normalises and rotates queries and keys, writes keys and values to the cache, and attends.

    With ``int8_cache``, all queries attend to the keys and values as the cache rounds them, even within a prompt. So a
    whole prompt gives the same bits as the same prompt in chunks.
    """

    def __init__(self, form: AttentionForm, dtype: str, causal_mask: Tensor, *, int8_cache: bool = False) -> None:
        super().__init__()
        self.int8_cache = int8_cache
        self.all_heads = (-1, form.num_kv_heads * form.head_dim)
        if int8_cache:
            self.integer_cache = IntegerCache(form, dtype)
            self.multiplied_out, self.gathered = MultipliedOut(form, dtype), GatheredBlocks(form, dtype)
        scale = form.head_dim**-0.5
        self.widths = tuple(heads * form.head_dim for heads in (form.num_heads, form.num_kv_heads, form.num_kv_heads))
        self.split = SplitWithSize()
        self.rotate = ApplyRotaryPosEmb(_ROTATE_HALVES)
        self.write_cache = ReshapeAndCache()
        self.paged = PagedAttention(form.num_heads, scale, form.num_kv_heads)
        self.norm = None if form.norm_epsilon is None else _HeadNorm(form.head_dim, form.norm_epsilon)
        self.has_window = form.window > 0
        # On an Ascend, these masks make the attention causal. The project's CPU kernels ignore the masks and compare
        # the positions of query and key instead.
        band = {"pre_tokens": form.window - 1, "next_tokens": 0, "sparse_mode": _BAND} if self.has_window else {}
        self.flash = FlashAttentionScore(head_num=form.num_heads, scale_value=scale, input_layout="TH", **band)
        self.causal_mask = causal_mask
        self.no_mask = no_mask(dtype)

    def construct(
        self,
        qkv: Tensor,
        of_heads: tuple[Tensor, ...],
        rotary: tuple[Tensor, ...],
        caches: tuple[Tensor, ...],
        step: tuple[Tensor, ...],
        whole_prompts: bool,
    ) -> Any:
        slot_mapping, block_tables, context_lens, query_lens = step[:4]
        keys, values = caches[:2]
        query, key, value = self.split(qkv, self.widths, -1)
        if self.norm is not None:
            query, key = self.norm(query, of_heads[0]), self.norm(key, of_heads[1])
        query, key = self.rotate(query, key, rotary[0], rotary[1], context_lens)
        if self.int8_cache:
            new_keys, new_values, scales, written = self.integer_cache(key, value, caches, slot_mapping)
            query = ops.depend(query, written[0])
            if whole_prompts:
                query = ops.depend(query, written[1])
                key, value = self.multiplied_out(new_keys, new_values, scales, self.all_heads)
            else:
                keys, values = self.gathered(caches, step[-1], written)
        else:
            query = ops.depend(query, self.write_cache(key, value, keys, values, slot_mapping))
        if whole_prompts:
            return self.flash(query, key, value, None, None, None, self.causal_mask, None, query_lens, query_lens)[3]
        mask = step[4] if len(step) > (5 if self.int8_cache else 4) else self.no_mask
        if self.has_window:
            mask = rotary[2]
        return self.paged(query, keys, values, block_tables, context_lens, None, None, mask, query_lens)


class _HeadNorm(nn.Cell):
    """Applies RMSNorm to each head of queries or keys."""

    def __init__(self, head_dim: int, epsilon: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.reshape, self.norm, self.shape = ops.Reshape(), RmsNorm(epsilon), ops.Shape()

    def construct(self, heads: Tensor, gamma: Tensor) -> Tensor:
        """Normalises ``heads`` [tokens, heads x head_size] with ``gamma`` [head_size]. Keeps the shape."""
        width = self.shape(heads)[1]
        return self.reshape(self.norm(self.reshape(heads, (-1, self.head_dim)), gamma)[0], (-1, width))


def _constant(array: Array, name: str) -> Parameter:
    return Parameter(as_tensor(array), name=name, requires_grad=False)
