"""The native op table."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops.auto_generate import (
    AddRmsNorm,
    ApplyRotaryPosEmb,
    FlashAttentionScore,
    PagedAttention,
    ReshapeAndCache,
    RmsNorm,
    SplitWithSize,
    Swiglu,
)

from agent.backends.base import CacheLayout, Operator, OpTable
from agent.layers.parameter import MINDSPORE_DTYPES, as_tensor, unbound_parameter
from agent.weights.storage import Array, from_float32

_ROTATE_HALVES = 2
"""``cos_format``: an element is rotated with the one half a head away; cos and sin have a row a token."""
_MASK_SIZE = 128
"""Of the compressed mask of FlashAttentionScore, which stands for a causal one of any size."""
_MASKED = -10000.0
"""What a mask adds to the scores that are not seen. FlashAttentionScore takes a mask of 0 and 1 in bfloat16 instead."""


class NativeOps(OpTable):
    """The primitives, float16 and bfloat16 (their front end takes no float32)."""

    name = "native"
    static_shapes = False
    has_whole_prompts = True
    packs_weights = False

    def __init__(self, dtype: str, max_positions: int) -> None:
        """``max_positions`` is what the widest block table has room for."""
        super().__init__(dtype)
        self._max_positions = max_positions

    def linear_weight(self, in_features: int, out_features: int) -> Any:
        return unbound_parameter((out_features, in_features), self.dtype)

    def cache_layout(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> CacheLayout:
        return (num_blocks, block_size, num_kv_heads, head_dim), self.dtype

    def embedding(self, width: int) -> Operator:
        return _Embedding()

    def norm_linear(self, out_features: int, epsilon: float, *, first: bool) -> Operator:
        return _NormLinear(epsilon) if first else _AddNormLinear(epsilon)

    def linear(self, out_features: int) -> Operator:
        return _Linear()

    def gated_mlp(self, width: int, epsilon: float) -> Operator:
        return _GatedMLP(epsilon)

    def lm_head(self, vocab_size: int, epsilon: float) -> Operator:
        return _LMHead(epsilon)

    def rotary(self, cos: Array, sin: Array) -> Operator:
        return _Rotary(cos, sin, self.dtype)

    def chunk_mask(self) -> Operator:
        return _ChunkMask(self._max_positions, self.dtype)

    def attention(self, num_heads: int, num_kv_heads: int, head_dim: int) -> Operator:
        return _Attention(num_heads, num_kv_heads, head_dim, self.dtype)


class _Embedding(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.gather = ops.Gather()

    def construct(self, table: Tensor, token_ids: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        return self.gather(table, token_ids, 0)


class _Linear(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(self, x: Tensor, weight: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        return self.matmul(x, weight)


class _NormLinear(nn.Cell):
    """The first of a model: ``residual`` is ``hidden``."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.norm = RmsNorm(epsilon)
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(
        self, hidden: Tensor, residual: Tensor, gamma: Tensor, weight: Tensor, step: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        return self.matmul(self.norm(hidden, gamma)[0], weight), residual


class _AddNormLinear(nn.Cell):
    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.add_norm = AddRmsNorm()
        self.epsilon = epsilon
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(
        self, hidden: Tensor, residual: Tensor, gamma: Tensor, weight: Tensor, step: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        normed, _, total = self.add_norm(hidden, residual, gamma, self.epsilon)
        return self.matmul(normed, weight), total


class _GatedMLP(nn.Cell):
    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.gate_up = _AddNormLinear(epsilon)
        self.activation = Swiglu()
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        gate_up: Tensor,
        down: Tensor,
        step: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        both, total = self.gate_up(hidden, residual, gamma, gate_up, step)
        return self.matmul(self.activation(both), down), total


class _LMHead(nn.Cell):
    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.gather = ops.Gather()
        self.norm_linear = _AddNormLinear(epsilon)

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        weight: Tensor,
        last_tokens: Tensor,
        step: tuple[Tensor, ...],
    ) -> Tensor:
        hidden, residual = self.gather(hidden, last_tokens, 0), self.gather(residual, last_tokens, 0)
        return self.norm_linear(hidden, residual, gamma, weight, step)[0]


class _Rotary(nn.Cell):
    """Rows of cos and sin for each token, in the model's type as the primitive wants them."""

    def __init__(self, cos: Array, sin: Array, dtype: str) -> None:
        super().__init__()
        self.cos = _constant(from_float32(cos, dtype), "cos")
        self.sin = _constant(from_float32(sin, dtype), "sin")
        self.gather = ops.Gather()

    def construct(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.gather(self.cos, positions, 0), self.gather(self.sin, positions, 0)


class _ChunkMask(nn.Cell):
    """PagedAttention's mask [T, positions] of steps where a sequence has several tokens: 0 where a token sees a
    position, what hides it where it does not."""

    def __init__(self, max_positions: int, dtype: str) -> None:
        super().__init__()
        self.columns = Tensor(np.arange(max_positions, dtype=np.int32)[None])
        self.masked = Tensor(_MASKED, MINDSPORE_DTYPES[dtype])
        self.dtype = MINDSPORE_DTYPES[dtype]
        self.reshape, self.greater, self.cast, self.multiply = ops.Reshape(), ops.Greater(), ops.Cast(), ops.Mul()

    def construct(self, positions: Tensor) -> Tensor:
        hidden = self.greater(self.columns, self.reshape(positions, (-1, 1)))
        return self.multiply(self.cast(hidden, self.dtype), self.masked)


class _Attention(nn.Cell):
    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: str) -> None:
        super().__init__()
        scale = head_dim**-0.5
        self.widths = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        self.split = SplitWithSize()
        self.rotate = ApplyRotaryPosEmb(_ROTATE_HALVES)
        self.write_cache = ReshapeAndCache()
        self.flash = FlashAttentionScore(head_num=num_heads, scale_value=scale, input_layout="TH")
        self.paged = PagedAttention(num_heads, scale, num_kv_heads)
        # Both primitives are causal by their masks on an Ascend. Ours are causal by position and do not read them.
        mask_dtype = MINDSPORE_DTYPES[dtype]
        masked = 1.0 if dtype == "bfloat16" else _MASKED
        self.causal_mask = Tensor(np.triu(np.ones((_MASK_SIZE, _MASK_SIZE)), 1) * masked, mask_dtype)
        self.no_mask = Tensor(np.zeros((1, 1)), mask_dtype)

    def construct(
        self,
        qkv: Tensor,
        rotary: tuple[Tensor, Tensor],
        key_cache: Tensor,
        value_cache: Tensor,
        step: tuple[Tensor, ...],
        whole_prompts: bool,
    ) -> Any:
        slot_mapping, block_tables, context_lens, query_lens = step[:4]
        mask = step[4] if len(step) > 4 else self.no_mask
        cos, sin = rotary
        query, key, value = self.split(qkv, self.widths, -1)
        query, key = self.rotate(query, key, cos, sin, context_lens)
        query = ops.depend(query, self.write_cache(key, value, key_cache, value_cache, slot_mapping))
        if whole_prompts:
            return self.flash(query, key, value, None, None, None, self.causal_mask, None, query_lens, query_lens)[3]
        return self.paged(query, key_cache, value_cache, block_tables, context_lens, None, None, mask, query_lens)


def _constant(array: Array, name: str) -> Parameter:
    return Parameter(as_tensor(array), name=name, requires_grad=False)
