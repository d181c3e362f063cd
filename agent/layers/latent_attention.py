"""Multi-head latent attention over a paged cache of latent vectors (DeepSeek-V2, arXiv:2405.04434)."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn

from agent.backends.base import LatentForm, OpTable
from agent.layers.linear import NormLinear, NormWeight, RowParallelLinear, Weight
from agent.layers.parameter import unbound_parameter
from llm_serving.model.shape import ModelShape

NORM_EPSILON = 1e-6
"""Epsilon of the norms of latent vectors. DeepSeek does not use ``rms_norm_eps`` for them."""


class LatentAttention(nn.Cell):
    """Multi-head latent attention of one layer, with the norm before it.

    The layer caches one latent vector for each token, and derives keys and values from this vector. It owns the
    Parameter of the cache. The op table decides the cache's layout, and ``agent.kv_cache`` allocates the memory. The
    heads are divided among the agents of a stage, but every agent caches the whole latent vectors.
    """

    def __init__(self, ops: OpTable, shape: ModelShape, num_blocks: int, block_size: int, *, layer: int) -> None:
        super().__init__()
        latent, heads, hidden = shape.latent, shape.num_attention_heads, shape.hidden_size
        assert latent is not None, "a model without latent attention has the layer Attention"
        queries = heads * latent.head_dim
        width = (latent.query_rank or queries) + latent.cache_dim
        self.joined = NormLinear(ops, hidden, width, shape.rms_norm_eps, first=layer == 0, num_layers=2)
        self.has_query_rank = latent.query_rank > 0
        if self.has_query_rank:
            self.query_norm = NormWeight(ops, latent.query_rank)
            self.query = Weight(ops.linear_weight(latent.query_rank, queries))
        self.latent_norm = NormWeight(ops, latent.rank)
        self.key_up = Weight(ops.head_weight(heads, latent.nope_dim, latent.rank))
        self.value_up = Weight(ops.head_weight(heads, latent.rank, latent.value_dim))
        self.output = RowParallelLinear(ops, heads * latent.value_dim, hidden)
        self.latent_cache = unbound_parameter(*ops.latent_cache_layout(num_blocks, block_size, latent.cache_dim))
        self.attention = ops.latent_attention(LatentForm(heads, latent, NORM_EPSILON))

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        rotary: tuple[Tensor, ...],
        step: tuple[Tensor, ...],
        whole_prompts: bool,
    ) -> tuple[Tensor, Tensor]:
        """Returns attention of RMSNorm(hidden + residual), and hidden + residual, both [tokens, hidden_size].

        ``gamma`` [hidden_size] is the norm's weight. ``OpTable`` describes ``rotary`` and ``step``. ``whole_prompts``
        is ignored.
        """
        joined, residual = self.joined(hidden, residual, gamma, step)
        weights: tuple[Any, ...] = (self.latent_norm.weight, self.key_up.operands(), self.value_up.operands())
        if self.has_query_rank:
            weights = (*weights, self.query_norm.weight, self.query.operands())
        attended = self.attention(joined, weights, rotary, self.latent_cache, step)
        return self.output(attended, step), residual
