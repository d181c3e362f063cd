"""Implements the int8 KV cache of the native op table: quantises new keys and values, and dequantises cached ones.

Before attention, this module gathers and dequantises the blocks of the step. The primitive PagedAttention could read an
int8 cache itself, but neither of its two kinds of scales can be used here. Scales of channels must be known before the
first token is cached. For scales of tokens, no source documents the layout in a paged cache. The project vllm-ascend
also gathered and dequantised blocks, for chunks of prompts and with scales of channels (pull request 4218).

``llm_serving.model.number_formats.scale_row_width`` describes a row of the cache of scales.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import DynamicQuantExt, ReshapeAndCache, SplitWithSize

from agent.backends.base import AttentionForm
from agent.layers.parameter import MINDSPORE_DTYPES
from llm_serving.model.number_formats import scale_row_copies, scale_row_width


class IntegerCache(nn.Cell):
    """Quantises the keys and values of the step and writes them to the caches. Each head of a token has its own scale.

    Returns (keys, values, scales, written). Keys and values are int8 [tokens, heads x head_size], and ``scales``
    [tokens, row width] has the rows of the cache of scales. An operator that reads the caches must take ``written`` as
    an input, so that it runs after the write.
    """

    def __init__(self, form: AttentionForm, dtype: str) -> None:
        super().__init__()
        self.head, self.heads = (-1, form.head_dim), (-1, form.num_kv_heads)
        self.all_heads = (-1, form.num_kv_heads * form.head_dim)
        self.copies = scale_row_copies(form.num_kv_heads)
        self.quantise, self.write = DynamicQuantExt(), ReshapeAndCache()
        self.reshape, self.join = ops.Reshape(), ops.Concat(1)
        self.cast, self.subtract = ops.Cast(), ops.Sub()
        self.dtype = MINDSPORE_DTYPES[dtype]

    def construct(
        self, key: Tensor, value: Tensor, caches: tuple[Tensor, ...], slot_mapping: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
        keys, key_scales = self.quantise(self.reshape(key, self.head), None)
        values, value_scales = self.quantise(self.reshape(value, self.head), None)
        keys, values = self.reshape(keys, self.all_heads), self.reshape(values, self.all_heads)
        exact = self.join((self.reshape(key_scales, self.heads), self.reshape(value_scales, self.heads)))
        high = self.cast(exact, self.dtype)
        low = self.cast(self.subtract(exact, self.cast(high, ms.float32)), self.dtype)
        scales = self.join((high, low) * self.copies)
        written = self.write(keys, values, caches[0], caches[1], slot_mapping)
        return keys, values, scales, (written, self.write(scales, None, caches[2], None, slot_mapping))


class MultipliedOut(nn.Cell):
    """Dequantises cached keys and values: multiplies each integer by the scale of its head and token. Returns floats of
    the model's type.

    The integers are int8 [..., heads x head_size] or [..., heads, head_size]. ``scales`` [..., row width] has the
    matching rows of the cache of scales. The products are computed in float32 and rounded once.
    """

    def __init__(self, form: AttentionForm, dtype: str) -> None:
        super().__init__()
        both, width = 2 * form.num_kv_heads, scale_row_width(form.num_kv_heads)
        self.parts = (both, both) if width == 2 * both else (both, both, width - 2 * both)
        self.each = (form.num_kv_heads, form.num_kv_heads)
        self.row, self.head, self.scale = (-1, width), (-1, form.head_dim), (-1, 1)
        self.split, self.reshape, self.cast = SplitWithSize(), ops.Reshape(), ops.Cast()
        self.add, self.multiply = ops.Add(), ops.Mul()
        self.dtype = MINDSPORE_DTYPES[dtype]

    def construct(self, keys: Tensor, values: Tensor, scales: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Returns the keys and the values, both of shape ``shape``. Its first size is -1, as in a Reshape."""
        parts = self.split(self.cast(self.reshape(scales, self.row), ms.float32), self.parts, -1)
        key_scales, value_scales = self.split(self.add(parts[0], parts[1]), self.each, -1)
        return self._product(keys, key_scales, shape), self._product(values, value_scales, shape)

    def _product(self, integers: Tensor, scales: Tensor, shape: tuple[int, ...]) -> Tensor:
        floats = self.cast(self.reshape(integers, self.head), ms.float32)
        return self.reshape(self.cast(self.multiply(floats, self.reshape(scales, self.scale)), self.dtype), shape)


class GatheredBlocks(nn.Cell):
    """Gathers the step's blocks from the caches of keys, values and scales. Returns keys and values [blocks,
    block_size, heads, head_size].

    ``step_blocks`` [blocks] are the numbers of the blocks, and ``written`` is the result of ``IntegerCache``.
    """

    def __init__(self, form: AttentionForm, dtype: str) -> None:
        super().__init__()
        self.sizes = (form.num_kv_heads, form.head_dim)
        self.gather, self.shape = ops.Gather(), ops.Shape()
        self.multiplied_out = MultipliedOut(form, dtype)

    def construct(
        self, caches: tuple[Tensor, ...], step_blocks: Tensor, written: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        blocks = ops.depend(ops.depend(step_blocks, written[0]), written[1])
        keys, values, scales = (
            self.gather(caches[0], blocks, 0),
            self.gather(caches[1], blocks, 0),
            self.gather(caches[2], blocks, 0),
        )
        found: tuple[Tensor, Tensor] = self.multiplied_out(
            keys, values, scales, (-1, self.shape(caches[0])[1], *self.sizes)
        )
        return found
