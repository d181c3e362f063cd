"""Implements attention with sinks and a clamped SwiGLU (gpt-oss, arXiv:2508.10925) of the native op table.

PagedAttention and FlashAttentionScore take no sinks, and PagedAttention takes no mask in decode steps. Therefore this
module uses FusedInferAttentionScore, which takes a mask in each step. It also returns log(sum), the logarithm of the
sum of exponentials in the softmax. The softmax with a sink is the softmax without a sink, multiplied by

    sum / (sum + exp(sink)) = sigmoid(log(sum) - sink)

FusedInferAttentionScore takes only one query for each row of a block table (MindSpore 2.9). Therefore the block table
has a row for each token, also in prompts (``OpTable.attends_by_token``).
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import (
    ApplyRotaryPosEmb,
    FusedInferAttentionScore,
    ReshapeAndCache,
    Sigmoid,
    SplitWithSize,
)

from agent.backends.base import AttentionForm
from agent.layers.parameter import MINDSPORE_DTYPES
from llm_serving.model.gpt_oss import SWIGLU_LIMIT, SWIGLU_SLOPE

_ROTATE_HALVES = 2
"""Value of the argument ``cos_format`` of ApplyRotaryPosEmb: it rotates pairs of elements that are half a head apart.
"""
_HIGH_PRECISION = 0
"""Value of ``inner_precise``: sums of float16 products are computed in float32."""


class WindowFlags(nn.Cell):
    """Makes the mask [tokens, max_positions] of an attention window from ``positions`` [tokens].

    The mask is True at positions before the token's window. The attention itself hides the positions after the token.
    """

    def __init__(self, max_positions: int, window: int) -> None:
        super().__init__()
        self.before = Tensor(window - 1, ms.int32)
        self.columns = Tensor(np.arange(max_positions, dtype=np.int32)[None])
        self.reshape, self.subtract, self.greater = ops.Reshape(), ops.Sub(), ops.Greater()

    def construct(self, positions: Tensor) -> Tensor:
        first = self.subtract(positions, self.before)
        return self.greater(self.reshape(first, (-1, 1)), self.columns)


class SinkAttention(nn.Cell):
    """Splits qkv, rotates queries and keys, writes keys and values to the cache, and attends with a sink for each head.

    ``step`` has a block table and a context length for each token.
    """

    def __init__(self, form: AttentionForm, dtype: str) -> None:
        super().__init__()
        query, key = form.num_heads * form.head_dim, form.num_kv_heads * form.head_dim
        self.widths, self.has_window = (query, key, key), form.window > 0
        self.one_query, self.blocks = (-1, 1, query), (-1, form.block_size, key)
        self.heads, self.all_heads = (-1, form.num_heads, form.head_dim), (-1, query)
        self.of_head, self.sums = (1, form.num_heads, 1), (-1, form.num_heads, 1)
        self.split, self.write_cache = SplitWithSize(), ReshapeAndCache()
        self.rotate = ApplyRotaryPosEmb(_ROTATE_HALVES)
        self.attend = FusedInferAttentionScore(
            num_heads=form.num_heads,
            scale_value=form.head_dim**-0.5,
            input_layout="BSH",
            num_key_value_heads=form.num_kv_heads,
            inner_precise=_HIGH_PRECISION,
            block_size=form.block_size,
            softmax_lse_flag=True,
        )
        self.reshape, self.cast, self.multiply = ops.Reshape(), ops.Cast(), ops.Mul()
        self.subtract, self.sigmoid = ops.Sub(), Sigmoid()
        self.dtype = MINDSPORE_DTYPES[dtype]

    def construct(
        self,
        qkv: Tensor,
        of_heads: tuple[Tensor, ...],
        rotary: tuple[Tensor, ...],
        caches: tuple[Tensor, ...],
        step: tuple[Tensor, ...],
        whole_prompts: bool,
    ) -> Tensor:
        slot_mapping, block_tables, context_lens = step[:3]
        query, key, value = self.split(qkv, self.widths, -1)
        query, key = self.rotate(query, key, rotary[0], rotary[1], context_lens)
        written = self.write_cache(key, value, caches[0], caches[1], slot_mapping)
        query = ops.depend(query, written)
        keys, values = self._written_blocks(caches[0], written), self._written_blocks(caches[1], written)
        mask = rotary[2] if self.has_window else None
        attended, sums = self.attend(
            self.reshape(query, self.one_query), (keys,), (values,), None, mask, None, context_lens,
            None, None, None, None, None, None, None, block_tables,
        )  # fmt: skip
        return self._with_sinks(attended, sums, of_heads[0])

    def _written_blocks(self, cache: Tensor, written: Tensor) -> Tensor:
        """Reshapes a cache to [blocks, block size, heads x head size], as FusedInferAttentionScore expects it.

        The primitive would read a cache with four axes as [blocks, heads, block size, head size]. The Reshape may copy
        the cache, so it must run after ``written``, the write of this step. Replays on a CPU skip the Reshape.
        """
        return self.reshape(ops.depend(cache, written), self.blocks)

    def _with_sinks(self, attended: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
        """Adds the sinks to the softmax of ``attended``, which is attention without sinks.

        ``sums`` [tokens, heads, 1, 1] has the logarithms of the sums of exponentials, and ``sinks`` [heads] has one
        sink for each head. The result is [tokens, heads x head_size].
        """
        above = self.subtract(self.reshape(sums, self.sums), self.reshape(sinks, self.of_head))
        heads = self.cast(self.reshape(attended, self.heads), ms.float32)
        found = self.cast(self.multiply(heads, self.sigmoid(above)), self.dtype)
        return self.reshape(found, self.all_heads)


class ClampedSwiglu(nn.Cell):
    """Returns g * sigmoid(1.702 g) * (u + 1), where g is the gate, at most 7, and u is up, clamped to -7 to 7.

    The first half of each row of the input is the gate, and the second half is up. The numbers are computed in float32
    and rounded once.
    """

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.limit, self.lowest, self.slope, self.one = (
            Tensor(number, ms.float32) for number in (SWIGLU_LIMIT, -SWIGLU_LIMIT, SWIGLU_SLOPE, 1.0)
        )
        self.cast, self.split, self.shape, self.sigmoid = ops.Cast(), SplitWithSize(), ops.Shape(), Sigmoid()
        self.minimum, self.maximum, self.multiply, self.add = ops.Minimum(), ops.Maximum(), ops.Mul(), ops.Add()
        self.dtype = MINDSPORE_DTYPES[dtype]

    def construct(self, both: Tensor) -> Tensor:
        width = self.shape(both)[1] // 2
        clamped = self.minimum(self.cast(both, ms.float32), self.limit)
        gate, up = self.split(clamped, (width, width), -1)
        up = self.add(self.maximum(up, self.lowest), self.one)
        gate = self.multiply(gate, self.sigmoid(self.multiply(gate, self.slope)))
        return self.cast(self.multiply(gate, up), self.dtype)
