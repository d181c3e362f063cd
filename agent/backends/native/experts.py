"""Implements the mixture of experts of the native op table, for float or integer weights (``agent.weights.forms``)."""

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
"""Argument of MoeInitRoutingV2: return the number of tokens of each expert instead of running sums."""
_ONE_OUTPUT, _ROWS, _SIZES = 3, 0, 1
"""The last three arguments of GroupedMatmulV4: ``split_item``, ``group_type`` and ``group_list_type``.

The arguments before them are x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, pre_token_scale,
group_list, and three arguments for an activation. Each call below writes out all arguments. With a starred argument,
MindSpore's graph would no longer record the layer of the call.
"""


def grouped_product(form: LinearForm) -> Operator:
    """Returns an operator (rows, weight, counts) -> products. It multiplies each row by the weight of the row's expert.

    rows [rows, in] are ordered by expert. ``OpTable.expert_weight`` describes the weight, which has all experts. counts
    (int64 [experts]) is the number of rows of each expert. The products are [rows, out].
    """
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
    """Multiplies rows by integer weights of experts. First quantises the rows to int8, with one scale for each row."""

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
    """Multiplies float rows by integer weights of experts. The primitive converts the weights to floats."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply = GroupedMatmulV4()

    def construct(self, rows: Tensor, weight: tuple[Tensor, Tensor, Tensor], groups: Tensor) -> Tensor:
        return self.multiply(
            (rows,), (weight[0],), None, None, None, (weight[1],), (weight[2],), None,
            groups, None, None, None, _ONE_OUTPUT, _ROWS, _SIZES,
        )[0]  # fmt: skip


class ExpertMLP(nn.Cell):
    """A mixture of experts. Returns the output of the experts, and hidden + residual.

    Orders the tokens by expert, multiplies them by the experts' weights in two grouped matrix products, and computes
    the weighted sum of each token's experts.
    """

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
        fractions, experts, _ = self.choose(logits, None, self.per_token)
        if self.normalised:
            fractions = self.divide(fractions, self.sum(fractions, -1))
        ordered, places, counts, _ = self.order(normed, experts, 0, 0, self.count, 0, _COUNTS, False)
        groups = self.cast(counts, self.int64)
        inner = self.activation(self.gate_up(ordered, gate_up, groups))
        out = self.restore(self.down(inner, down, groups), places, self.cast(fractions, self.dtype), False, None)
        return out, total
