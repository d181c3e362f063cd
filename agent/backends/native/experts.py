"""Implements the mixture of experts of the native op table, for float or integer weights (``agent.weights.forms``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import (
    AddRmsNorm,
    DynamicQuantExt,
    FusedAddTopKDiv,
    GroupedMatmulV4,
    MoeGatingTopKSoftmax,
    MoeInitRoutingV2,
    MoeTokenUnpermute,
    NanToNum,
    Softmax,
    Swiglu,
    TopkExt,
)

from agent.backends.base import Operator
from agent.backends.native.linear import matrix_product
from agent.backends.native.sinks import ClampedSwiglu
from agent.layers.parameter import MINDSPORE_DTYPES
from agent.weights.forms import LinearForm, LinearForms
from llm_serving.model.deepseek import Routing
from llm_serving.model.families import Experts
from llm_serving.model.gpt_oss import ACTIVATION as CLAMPED_SILU

_COUNTS = 2
"""Argument of MoeInitRoutingV2: return the number of tokens of each expert instead of running sums."""
_ONE_OUTPUT, _ROWS, _SIZES = 3, 0, 1
"""The arguments ``split_item``, ``group_type`` and ``group_list_type`` of GroupedMatmulV4. They are the last three
arguments of GroupedMatmulV4.

The other arguments are x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, pre_token_scale, group_list,
and three arguments for an activation. The calls do not unpack arguments with ``*``. Otherwise MindSpore's graph would
lose the operator's scope, which names the layer that calls it.
"""

_SIGMOID, _SUMMED_OF_GROUP = 0, 2
"""Arguments of FusedAddTopKDiv. ``_SIGMOID`` is the ``activate_type`` for a sigmoid router. ``_SUMMED_OF_GROUP`` is the
number of experts whose scores are summed to rank a group: the 2 best experts of the group.
"""


def grouped_product(form: LinearForm) -> Operator:
    """Returns an operator (rows, weight, counts) -> products, which multiplies each row by the weight of the row's
    expert.

    ``rows`` [rows, in] are ordered by expert. ``weight`` has the weights of all experts (``OpTable.expert_weight``).
    ``counts`` int64 [experts] has the number of rows of each expert. The products are [rows, out]. The operator takes a
    bias [experts, out] as one more input, which may be None.
    """
    if form.is_float:
        return _FloatProducts()
    return _DynamicProducts() if form.quantises_activations else _WeightOnlyProducts()


class _FloatProducts(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.multiply = GroupedMatmulV4()

    def construct(self, rows: Tensor, weight: Tensor, groups: Tensor, bias: Tensor | None = None) -> Tensor:
        biases = None if bias is None else (bias,)
        return self.multiply(
            (rows,), (weight,), biases, None, None, None, None, None,
            groups, None, None, None, _ONE_OUTPUT, _ROWS, _SIZES,
        )[0]  # fmt: skip


class _DynamicProducts(nn.Cell):
    """Multiplies rows by integer weights of experts. First quantises the rows to int8, with one scale for each row.

    Ignores ``bias``: for int8 rows, GroupedMatmulV4 takes no float bias. The loader refuses experts with a bias in this
    case.
    """

    def __init__(self) -> None:
        super().__init__()
        self.quantise, self.multiply = DynamicQuantExt(), GroupedMatmulV4()

    def construct(
        self, rows: Tensor, weight: tuple[Tensor, Tensor], groups: Tensor, bias: Tensor | None = None
    ) -> Tensor:
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

    def construct(
        self, rows: Tensor, weight: tuple[Tensor, Tensor, Tensor], groups: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        biases = None if bias is None else (bias,)
        return self.multiply(
            (rows,), (weight[0],), biases, None, None, (weight[1],), (weight[2],), None,
            groups, None, None, None, _ONE_OUTPUT, _ROWS, _SIZES,
        )[0]  # fmt: skip


class _SoftmaxRouter(nn.Cell):
    """Chooses the experts with the largest values of a softmax over all experts.

    Returns the weights of the chosen experts, float32 [tokens, chosen], and their numbers, int32 [tokens, chosen].
    """

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.choose = MoeGatingTopKSoftmax()
        self.sum, self.divide, self.multiply = ops.ReduceSum(keep_dims=True), ops.RealDiv(), ops.Mul()
        self.per_token, self.normalised = experts.per_token, experts.normalised
        factor = 1.0 if experts.routing is None else experts.routing.factor
        self.factor = None if factor == 1.0 else Tensor(factor, MINDSPORE_DTYPES["float32"])

    def construct(self, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        fractions, chosen, _ = self.choose(logits, None, self.per_token)
        if self.normalised:
            fractions = self.divide(fractions, self.sum(fractions, -1))
        if self.factor is not None:
            fractions = self.multiply(fractions, self.factor)
        return fractions, chosen


class _GroupRouter(nn.Cell):
    """The router of DeepSeek V3. An expert's score is the sigmoid of its logit, plus a correction from the checkpoint.

    First ranks each group of experts by the sum of its 2 best scores, and chooses the best groups. Then chooses the
    experts with the best scores of these groups. Returns the same tensors as ``_SoftmaxRouter``.
    """

    def __init__(self, experts: Experts, routing: Routing) -> None:
        super().__init__()
        self.choose = FusedAddTopKDiv()
        self.groups, self.chosen_groups = routing.groups, routing.chosen_groups
        self.per_token, self.normalised, self.factor = experts.per_token, experts.normalised, routing.factor

    def construct(self, logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        fractions, chosen = self.choose(
            logits, correction, self.groups, self.chosen_groups, _SUMMED_OF_GROUP, self.per_token, _SIGMOID,
            self.normalised, self.factor, None, None, False,
        )  # fmt: skip
        return fractions, chosen


class _LimitedRouter(nn.Cell):
    """The router of DeepSeek V2 with groups. An expert's score is the softmax of its logit, over all experts.

    The score of a group of experts is the best score of its experts. For each token, first chooses the groups with the
    best scores, then the experts with the best scores in these groups. The weights of the experts are their scores
    times a factor. Returns the same tensors as ``_SoftmaxRouter``. No primitive of MindSpore does all of this in
    float32.
    """

    def __init__(self, experts: Experts, routing: Routing) -> None:
        super().__init__()
        self.score, self.largest, self.best = Softmax(-1), ops.ArgMaxWithValue(axis=-1), TopkExt()
        self.reshape, self.by_group = ops.Reshape(), (-1, routing.groups, experts.count // routing.groups)
        self.gather, self.sum, self.minimum = ops.Gather(), ops.ReduceSum(), ops.Minimum()
        self.chosen_groups, self.per_token = routing.chosen_groups, experts.per_token
        self.bounds = Tensor(group_bounds(experts.count, routing))
        self.cast, self.int32 = ops.Cast(), MINDSPORE_DTYPES["int32"]
        self.multiply = ops.Mul()
        self.factor = None if routing.factor == 1.0 else Tensor(routing.factor, MINDSPORE_DTYPES["float32"])

    def construct(self, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = self.score(logits)
        _, of_groups = self.largest(self.reshape(scores, self.by_group))
        _, groups = self.best(of_groups, self.chosen_groups, -1, True, True)
        bounds = self.sum(self.gather(self.bounds, groups, 0), 1)
        fractions, chosen = self.best(self.minimum(scores, bounds), self.per_token, -1, True, True)
        if self.factor is not None:
            fractions = self.multiply(fractions, self.factor)
        return fractions, self.cast(chosen, self.int32)


def group_bounds(count: int, routing: Routing) -> npt.NDArray[np.float32]:
    """Returns a table [groups, experts], with which the router excludes the experts outside of the chosen groups.

    The router adds up the rows of a token's chosen groups. For each expert, this sum is an upper bound of the score.
    For experts of the chosen groups, the sum is 2. Their scores are at most 1, so they do not change. For all other
    experts, the sum is negative and replaces the score, so they are never chosen. The sums are exact.
    """
    bounds = np.full((routing.groups, count), -1, np.float32)
    for group, row in enumerate(np.split(bounds, routing.groups)):
        np.split(row, routing.groups, axis=1)[group][:] = routing.chosen_groups + 1
    return bounds


def _router(experts: Experts) -> nn.Cell:
    """Makes the operator that chooses the experts of each token.

    The operator maps (logits float32 [tokens, experts], correction float32 [experts] or None) to the weights and the
    numbers of the chosen experts. ``_SoftmaxRouter`` describes both results.
    """
    routing = experts.routing
    if routing is not None and routing.sigmoid:
        return _GroupRouter(experts, routing)
    if routing is not None and routing.groups > 1:
        return _LimitedRouter(experts, routing)
    return _SoftmaxRouter(experts)


class _OwnExperts(nn.Cell):
    """Restricts a choice of experts to the experts that this agent has.

    The experts are renumbered, so that this agent's experts come first. A token's weights for experts of other agents
    become 0.
    """

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        numbers = (np.arange(experts.count, dtype=np.int32) - experts.first_held) % experts.count
        self.numbers = Tensor(numbers)
        self.is_own = Tensor((numbers < experts.held).astype(np.float32))
        self.first = Tensor(np.arange(experts.held, dtype=np.int32))
        self.gather, self.multiply = ops.Gather(), ops.Mul()

    def construct(self, fractions: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return self.multiply(fractions, self.gather(self.is_own, chosen, 0)), self.gather(self.numbers, chosen, 0)

    def counts(self, counts: Tensor) -> Tensor:
        """Selects this agent's experts from ``counts``, which has the number of rows of every expert of the model.

        ``counts`` and the result are in the order of the renumbered experts, so this agent's experts come first.
        """
        return self.gather(counts, self.first, 0)


class ExpertMLP(nn.Cell):
    """A mixture of experts. Returns the output of the experts, and hidden + residual.

    Orders the tokens by expert, multiplies them by the experts' weights in two grouped matrix products, and computes
    the weighted sum of each token's experts. If an agent has only some of the experts, its sum contains only these
    experts.
    """

    def __init__(self, experts: Experts, epsilon: float, forms: LinearForms, dtype: str) -> None:
        super().__init__()
        form, routing = forms.experts, experts.routing
        self.add_norm = AddRmsNorm()
        self.epsilon = epsilon
        self.matmul = ops.MatMul(transpose_b=True)
        self.cast = ops.Cast()
        self.is_corrected = routing is not None and routing.corrected
        self.choose = _router(experts)
        self.own = None if experts.num_held is None else _OwnExperts(experts)
        self.without_undefined = NanToNum(0.0, 0.0, 0.0)
        self.order = MoeInitRoutingV2()
        self.gate_up, self.down = grouped_product(form), grouped_product(form)
        self.activation = ClampedSwiglu(dtype) if experts.activation == CLAMPED_SILU else Swiglu()
        self.restore = MoeTokenUnpermute()
        self.shared = _SharedExperts(forms.layers, dtype) if experts.shared_size else None
        self.add = ops.Add()
        self.is_biased = experts.biased
        self.count = experts.count
        self.dtype = MINDSPORE_DTYPES[dtype]
        self.float32, self.int64 = MINDSPORE_DTYPES["float32"], MINDSPORE_DTYPES["int64"]

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        weights: tuple[Any, ...],
        step: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        router, gate_up, down = weights[:3]
        correction = weights[3] if self.is_corrected else None
        biases = weights[-3:] if self.is_biased else (None, None, None)
        normed, _, total = self.add_norm(hidden, residual, gamma, self.epsilon)
        logits = self.matmul(self.cast(normed, self.float32), router)
        if self.is_biased:
            logits = self.add(logits, biases[0])
        fractions, experts = self.choose(logits, correction)
        if self.own is not None:
            fractions, experts = self.own(fractions, experts)
        ordered, places, counts, _ = self.order(normed, experts, 0, 0, self.count, 0, _COUNTS, False)
        groups = self.cast(counts if self.own is None else self.own.counts(counts), self.int64)
        inner = self.activation(self.gate_up(ordered, gate_up, groups, biases[1]))
        rows = self.down(inner, down, groups, biases[2])
        if self.own is not None:
            # The rows for experts of other agents are undefined, and could be NaN. Their weights are 0.
            rows = self.without_undefined(rows)
        out = self.restore(rows, places, self.cast(fractions, self.dtype), False, None)
        if self.shared is not None:
            out = self.add(out, self.shared(normed, weights[-2], weights[-1]))
        return out, total


class _SharedExperts(nn.Cell):
    """The gated MLP that processes every token, in addition to the token's own experts."""

    def __init__(self, form: LinearForm, dtype: str) -> None:
        super().__init__()
        self.gate_up, self.down = matrix_product(form, dtype), matrix_product(form, dtype)
        self.activation = Swiglu()

    def construct(self, normed: Tensor, gate_up: Any, down: Any) -> Tensor:
        return self.down(self.activation(self.gate_up(normed, gate_up)), down)
