"""A mixture of experts of the native op table, with weights of floats or integers (``agent.weights.forms``)."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import (
    AddRmsNorm,
    DynamicQuantExt,
    GroupedMatmulV4,
    MoeGatingTopKSoftmax,
    MoeInitRoutingV2,
    MoeTokenUnpermute,
    Swiglu,
)

from agent.backends.base import Operator
from agent.layers.parameter import MINDSPORE_DTYPES
from agent.weights.forms import LinearForm
from llm_serving.model.families import Experts

_COUNTS = 2
"""MoeInitRoutingV2: how many tokens each expert has, rather than running sums."""
_ONE_OUTPUT, _ROWS, _SIZES = 3, 0, 1
"""GroupedMatmulV4: ``split_item``, ``group_type`` and ``group_list_type``. Its operands are x, weight, bias, scale,
offset, antiquant_scale, antiquant_offset, pre_token_scale, group_list, three of an activation, and these. They are
written out one by one: behind a star the graph forgets which layer a call belongs to."""


def grouped_product(form: LinearForm) -> Operator:
    """(rows [N, in] ordered by expert, weight as ``OpTable.expert_mlp`` takes it, groups int64 [experts], how many rows
    each expert has) -> [N, out]."""
    if form.is_float:
        return _FloatProducts()
    return _DynamicProducts() if form.quantises_activations else _WeightOnlyProducts()


class _FloatProducts(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.multiply = GroupedMatmulV4()

    def construct(self, rows: Tensor, weight: Tensor, groups: Tensor) -> Tensor:
        return self.multiply(
            (rows,), (weight,), None, None, None, None, None, None,
            groups, None, None, None, _ONE_OUTPUT, _ROWS, _SIZES,
        )[0]  # fmt: skip


class _DynamicProducts(nn.Cell):
    """Activations are quantised, a scale a row, and integers multiplied by integers."""

    def __init__(self) -> None:
        super().__init__()
        self.quantise, self.multiply = DynamicQuantExt(), GroupedMatmulV4()

    def construct(self, rows: Tensor, weight: tuple[Tensor, Tensor], groups: Tensor) -> Tensor:
        integers, scales = self.quantise(rows, None)
        return self.multiply(
            (integers,), (weight[0],), None, (weight[1],), None, None, None, (scales,),
            groups, None, None, None, _ONE_OUTPUT, _ROWS, _SIZES,
        )[0]  # fmt: skip


class _WeightOnlyProducts(nn.Cell):
    """Integers become floats where they are multiplied; activations stay floats."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply = GroupedMatmulV4()

    def construct(self, rows: Tensor, weight: tuple[Tensor, Tensor, Tensor], groups: Tensor) -> Tensor:
        return self.multiply(
            (rows,), (weight[0],), None, None, None, (weight[1],), (weight[2],), None,
            groups, None, None, None, _ONE_OUTPUT, _ROWS, _SIZES,
        )[0]  # fmt: skip


class ExpertMLP(nn.Cell):
    """Rows are ordered by expert, go through two grouped matrix products, and come back weighted."""

    def __init__(self, experts: Experts, epsilon: float, form: LinearForm, dtype: str) -> None:
        super().__init__()
        self.add_norm = AddRmsNorm()
        self.epsilon = epsilon
        self.matmul = ops.MatMul(transpose_b=True)
        self.cast = ops.Cast()
        self.choose = MoeGatingTopKSoftmax()
        self.order = MoeInitRoutingV2()
        self.gate_up, self.down = grouped_product(form), grouped_product(form)
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
        weights: tuple[Tensor, Any, Any],
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
        inner = self.activation(self.gate_up(ordered, gate_up, groups))
        out = self.restore(self.down(inner, down, groups), places, self.cast(shares, self.dtype), False, None)
        return out, total
