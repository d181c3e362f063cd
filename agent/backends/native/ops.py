"""The native op table."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops.auto_generate import (
    AddRmsNorm,
    ApplyRotaryPosEmb,
    FlashAttentionScore,
    GroupedMatmulV4,
    MoeGatingTopKSoftmax,
    MoeInitRoutingV2,
    MoeTokenUnpermute,
    PagedAttention,
    ReshapeAndCache,
    RmsNorm,
    SplitWithSize,
    Swiglu,
)

from agent.backends.base import AttentionForm, CacheLayout, Operator, OpTable
from agent.layers.parameter import MINDSPORE_DTYPES, as_tensor, unbound_parameter
from agent.weights.storage import Array, from_float32
from llm_serving.model_families import Experts

_ROTATE_HALVES = 2
"""``cos_format``: an element is rotated with the one half a head away; cos and sin have a row a token."""
_MASK_SIZE = 128
_BAND_MASK_SIZE = 2048
"""Of the compressed mask that ``sparse_mode`` 4 wants."""
_BAND = 4
"""``sparse_mode``: between ``pre_tokens`` before a query and ``next_tokens`` behind it."""
_MASKED = -10000.0
"""What PagedAttention's mask adds to the scores of keys that are not seen."""
_COUNTS = 2
"""MoeInitRoutingV2: how many tokens each expert has, rather than running sums."""


class NativeOps(OpTable):
    """The primitives, float16 and bfloat16 (their front end takes no float32)."""

    name = "native"
    static_shapes = False
    has_whole_prompts = True
    packs_weights = False

    def __init__(self, dtype: str) -> None:
        super().__init__(dtype)
        self._masks: dict[int, Tensor] = {}

    def linear_weight(self, in_features: int, out_features: int) -> Any:
        return unbound_parameter((out_features, in_features), self.dtype)

    def router_weight(self, in_features: int, num_experts: int) -> Any:
        return unbound_parameter((num_experts, in_features), "float32")

    def expert_weight(self, num_experts: int, in_features: int, out_features: int) -> Any:
        return unbound_parameter((num_experts, in_features, out_features), self.dtype)

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

    def expert_mlp(self, width: int, experts: Experts, epsilon: float) -> Operator:
        return _ExpertMLP(experts, epsilon, self.dtype)

    def lm_head(self, vocab_size: int, epsilon: float) -> Operator:
        return _LMHead(epsilon)

    def rotary(self, cos: Array, sin: Array, window: int) -> Operator:
        return _Rotary(cos, sin, self.dtype) if window == 0 else _RotaryAndMask(cos, sin, self.dtype, window)

    def attention(self, form: AttentionForm) -> Operator:
        size = _MASK_SIZE if form.window == 0 else _BAND_MASK_SIZE
        if size not in self._masks:
            self._masks[size] = Tensor(np.triu(np.ones((size, size), np.float32), 1), MINDSPORE_DTYPES[self.dtype])
        return _Attention(form, self.dtype, self._masks[size])


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
        self.add = ops.Add()

    def construct(self, x: Tensor, weight: Tensor, bias: Tensor | None, step: tuple[Tensor, ...]) -> Tensor:
        out = self.matmul(x, weight)
        return out if bias is None else self.add(out, bias)


class _NormLinear(nn.Cell):
    """The first of a model: ``residual`` is ``hidden``."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.norm = RmsNorm(epsilon)
        self.linear = _Linear()

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        step: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        return self.linear(self.norm(hidden, gamma)[0], weight, bias, step), residual


class _AddNormLinear(nn.Cell):
    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.add_norm = AddRmsNorm()
        self.epsilon = epsilon
        self.linear = _Linear()

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        step: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        normed, _, total = self.add_norm(hidden, residual, gamma, self.epsilon)
        return self.linear(normed, weight, bias, step), total


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
        both, total = self.gate_up(hidden, residual, gamma, gate_up, None, step)
        return self.matmul(self.activation(both), down), total


class _ExpertMLP(nn.Cell):
    """Rows are ordered by expert, go through two grouped matrix products, and come back weighted."""

    def __init__(self, experts: Experts, epsilon: float, dtype: str) -> None:
        super().__init__()
        self.add_norm = AddRmsNorm()
        self.epsilon = epsilon
        self.matmul = ops.MatMul(transpose_b=True)
        self.cast = ops.Cast()
        self.choose = MoeGatingTopKSoftmax()
        self.order = MoeInitRoutingV2()
        self.grouped = GroupedMatmulV4()
        self.activation = Swiglu()
        self.restore = MoeTokenUnpermute()
        self.sum = ops.ReduceSum(keep_dims=True)
        self.divide = ops.RealDiv()
        self.count, self.per_token, self.normalised = experts.count, experts.per_token, experts.normalised
        self.dtype = MINDSPORE_DTYPES[dtype]
        self.float32, self.int64 = MINDSPORE_DTYPES["float32"], MINDSPORE_DTYPES["int64"]

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        weights: tuple[Tensor, Tensor, Tensor],
        step: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        router, gate_up, down = weights
        normed, _, total = self.add_norm(hidden, residual, gamma, self.epsilon)
        logits = self.matmul(self.cast(normed, self.float32), router)
        shares, experts, _ = self.choose(logits, None, self.per_token)
        if self.normalised:
            shares = self.divide(shares, self.sum(shares, -1))
        ordered, places, counts, _ = self.order(normed, experts, 0, 0, self.count, 0, _COUNTS, False)
        groups = self.cast(counts, self.int64)
        inner = self.activation(self._multiply(ordered, gate_up, groups))
        out = self.restore(self._multiply(inner, down, groups), places, self.cast(shares, self.dtype), False, None)
        return out, total

    def _multiply(self, rows: Tensor, weights: Tensor, groups: Tensor) -> Tensor:
        """One output (``split_item`` 3) of row groups (``group_type`` 0) of these sizes (``group_list_type`` 1)."""
        none = (None, None, None, None, None, None)
        return self.grouped([rows], [weights], *none, groups, None, None, None, 3, 0, 1)[0]


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
        return self.norm_linear(hidden, residual, gamma, weight, None, step)[0]


class _Rotary(nn.Cell):
    """Rows of cos and sin for each token, in the model's type as the primitive wants them."""

    def __init__(self, cos: Array, sin: Array, dtype: str) -> None:
        super().__init__()
        self.cos = _constant(from_float32(cos, dtype), "cos")
        self.sin = _constant(from_float32(sin, dtype), "sin")
        self.gather = ops.Gather()

    def construct(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.gather(self.cos, positions, 0), self.gather(self.sin, positions, 0)


class _RotaryAndMask(nn.Cell):
    """The same, and for windows a mask [T, positions]: 0 where a token sees a position, else what hides it."""

    def __init__(self, cos: Array, sin: Array, dtype: str, window: int) -> None:
        super().__init__()
        self.rotary = _Rotary(cos, sin, dtype)
        self.window = window
        self.columns = Tensor(np.arange(len(cos), dtype=np.int32)[None])
        self.reshape, self.cast = ops.Reshape(), ops.Cast()
        self.at_most, self.above, self.either = ops.LessEqual(), ops.Greater(), ops.LogicalOr()
        self.dtype = MINDSPORE_DTYPES[dtype]

    def construct(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = self.rotary(positions)
        rows = self.reshape(positions, (-1, 1))
        too_old = self.at_most(self.columns, rows - self.window)
        hidden = self.either(too_old, self.above(self.columns, rows))
        return cos, sin, self.cast(hidden, self.dtype) * _MASKED


class _Attention(nn.Cell):
    def __init__(self, form: AttentionForm, dtype: str, causal_mask: Tensor) -> None:
        super().__init__()
        scale = form.head_dim**-0.5
        self.widths = tuple(heads * form.head_dim for heads in (form.num_heads, form.num_kv_heads, form.num_kv_heads))
        self.split = SplitWithSize()
        self.rotate = ApplyRotaryPosEmb(_ROTATE_HALVES)
        self.write_cache = ReshapeAndCache()
        self.paged = PagedAttention(form.num_heads, scale, form.num_kv_heads)
        self.norm = None if form.norm_epsilon is None else _HeadNorm(form.head_dim, form.norm_epsilon)
        self.has_window = form.window > 0
        # Both primitives are causal by these masks on an Ascend. Ours are causal by position and do not read them.
        band = {"pre_tokens": form.window - 1, "sparse_mode": _BAND} if self.has_window else {}
        self.flash = FlashAttentionScore(
            head_num=form.num_heads, scale_value=scale, next_tokens=0, input_layout="TH", **band
        )
        self.causal_mask = causal_mask
        self.no_mask = Tensor(np.zeros((1, 1)), MINDSPORE_DTYPES[dtype])

    def construct(
        self,
        qkv: Tensor,
        head_norms: tuple[Tensor, ...],
        rotary: tuple[Tensor, ...],
        caches: tuple[Tensor, Tensor],
        step: tuple[Tensor, ...],
        whole_prompts: bool,
    ) -> Any:
        slot_mapping, block_tables, context_lens, query_lens = step
        keys, values = caches
        query, key, value = self.split(qkv, self.widths, -1)
        if self.norm is not None:
            query, key = self.norm(query, head_norms[0]), self.norm(key, head_norms[1])
        query, key = self.rotate(query, key, rotary[0], rotary[1], context_lens)
        query = ops.depend(query, self.write_cache(key, value, keys, values, slot_mapping))
        if whole_prompts:
            return self.flash(query, key, value, None, None, None, self.causal_mask, None, query_lens, query_lens)[3]
        mask = rotary[2] if self.has_window else self.no_mask
        return self.paged(query, keys, values, block_tables, context_lens, None, None, mask, query_lens)


class _HeadNorm(nn.Cell):
    """RMSNorm of every head."""

    def __init__(self, head_dim: int, epsilon: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.reshape, self.norm, self.shape = ops.Reshape(), RmsNorm(epsilon), ops.Shape()

    def construct(self, heads: Tensor, gamma: Tensor) -> Tensor:
        """[T, heads x head_dim] -> the same, normed."""
        width = self.shape(heads)[1]
        return self.reshape(self.norm(self.reshape(heads, (-1, self.head_dim)), gamma)[0], (-1, width))


def _constant(array: Array, name: str) -> Parameter:
    return Parameter(as_tensor(array), name=name, requires_grad=False)
