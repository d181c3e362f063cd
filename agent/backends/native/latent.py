"""Implements multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) of the native op table.

All steps run the absorbed form: the up-projections of keys and values are applied to queries and results. Every query
attends to the cached latent vectors. MindFormers and vllm-mindspore use the same primitives for decode steps and for
parts of prompts. For whole prompts, these projects compute keys and values instead, whose rounding differs.
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import ApplyRotaryPosEmb, PagedAttention, ReshapeAndCache, RmsNorm, SplitWithSize

from agent.backends.base import LatentForm
from agent.backends.native.attention import no_mask
from agent.backends.native.linear import matrix_product
from agent.weights.forms import LinearForm

_ROTATE_HALVES, _ROTATE_PAIRS = 2, 3
"""Values of the argument ``cos_format`` of ApplyRotaryPosEmb. _ROTATE_HALVES rotates pairs of elements that are half a
head apart, and _ROTATE_PAIRS pairs of adjacent elements. Both take a row of cos and sin for each token.
"""
_SWAPPED = (1, 0, 2)


class LatentAttention(nn.Cell):
    """Normalises and rotates the parts of ``joined``, writes a row to the cache, and attends to the cached rows.

    ``OpTable.latent_attention`` describes the arguments. A row of the cache has the normalised latent vector, then the
    rotated key. The whole row is the key of every head, and its latent vector is the value of every head.
    """

    def __init__(self, form: LatentForm, linear: LinearForm, dtype: str) -> None:
        super().__init__()
        latent, heads = form.latent, form.num_heads
        self.parts = (latent.query_rank or heads * latent.head_dim, latent.rank, latent.rope_dim)
        self.head_parts = (latent.nope_dim, latent.rope_dim)
        self.head, self.rope = (-1, heads, latent.head_dim), (-1, heads, latent.rope_dim)
        self.latents = (-1, heads, latent.rank)
        self.all_rope, self.all_rows = (-1, heads * latent.rope_dim), (-1, heads * latent.cache_dim)
        self.all_values = (-1, heads * latent.value_dim)
        self.has_query_rank = latent.query_rank > 0
        self.query_product = matrix_product(linear, dtype)
        self.norm = RmsNorm(form.norm_epsilon)
        self.split, self.reshape, self.transpose = SplitWithSize(), ops.Reshape(), ops.Transpose()
        self.join_row, self.join_heads = ops.Concat(1), ops.Concat(2)
        self.multiply_heads = ops.BatchMatMul()
        self.rotate = ApplyRotaryPosEmb(_ROTATE_PAIRS if latent.interleaved else _ROTATE_HALVES)
        self.write_cache = ReshapeAndCache()
        scale = latent.score_factor * latent.head_dim**-0.5
        self.paged = PagedAttention(heads, scale, 1, mla_v_dim=latent.rank)
        self.no_mask = no_mask(dtype)

    def construct(
        self,
        joined: Tensor,
        weights: tuple[Any, ...],
        rotary: tuple[Tensor, ...],
        cache: Tensor,
        step: tuple[Tensor, ...],
    ) -> Tensor:
        slot_mapping, block_tables, context_lens, query_lens = step[:4]
        queries, latent, key = self.split(joined, self.parts, -1)
        if self.has_query_rank:
            queries = self.query_product(self.norm(queries, weights[3])[0], weights[4])
        plain, rotated = self.split(self.reshape(queries, self.head), self.head_parts, -1)
        rotated = self.reshape(rotated, self.all_rope)
        rotated, key = self.rotate(rotated, key, rotary[0], rotary[1], context_lens)
        row = self.join_row((self.norm(latent, weights[0])[0], key))
        absorbed = self._by_heads(plain, weights[1])
        query = self.reshape(self.join_heads((absorbed, self.reshape(rotated, self.rope))), self.all_rows)
        query = ops.depend(query, self.write_cache(row, None, cache, None, slot_mapping))
        mask = step[4] if len(step) > 4 else self.no_mask
        attended = self.paged(query, cache, cache, block_tables, context_lens, None, None, mask, query_lens)
        return self.reshape(self._by_heads(self.reshape(attended, self.latents), weights[2]), self.all_values)

    def _by_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiplies x [tokens, heads, in] by the matrix [in, out] of each head in ``weight``."""
        return self.transpose(self.multiply_heads(self.transpose(x, _SWAPPED), weight), _SWAPPED)
