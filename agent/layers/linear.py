"""Linear layers. A packed weight includes bias and scales. Without packing, they are separate parameters."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn

from agent.backends.base import LinearParameters, OpTable
from agent.layers.parameter import unbound_parameter


class Weight(nn.Cell):
    """The parameters of a linear layer's weight, for an operator of the op table."""

    def __init__(self, parameters: LinearParameters) -> None:
        super().__init__()
        self.weight, self.scale, self.offset = parameters

    def operands(self) -> Any:
        """Returns what operators take as the weight: the weight, or a tuple of weight, scales and offsets."""
        if self.scale is None:
            return self.weight
        return (self.weight, self.scale) if self.offset is None else (self.weight, self.scale, self.offset)


class RowParallelLinear(Weight):
    """``y = x @ weight.T + bias``, summed over the agents of the stage.

    The agents share the columns of x and of the weight, and only the first agent adds the bias. An agent that has all
    columns computes the plain linear layer."""

    def __init__(self, ops: OpTable, in_features: int, out_features: int, *, biased: bool = False) -> None:
        super().__init__(ops.linear_weight(in_features, out_features))
        self.bias = _bias(ops, out_features, biased=biased and ops.is_first)
        self.linear = ops.linear(out_features)
        self.sum = ops.all_reduce(out_features) if ops.is_split else None

    def construct(self, x: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        """x [T, in_features] -> [T, out_features]."""
        out = self.linear(x, self.operands(), self.bias, step)
        return out if self.sum is None else self.sum(out, step)


class NormLinear(Weight):
    """``y = RMSNorm(hidden + residual) @ weight.T + bias``; the caller passes the norm's ``gamma``."""

    def __init__(
        self, ops: OpTable, in_features: int, out_features: int, epsilon: float, *, first: bool, biased: bool = False
    ) -> None:
        super().__init__(ops.linear_weight(in_features, out_features))
        self.bias = _bias(ops, out_features, biased=biased)
        self.norm_linear = ops.norm_linear(out_features, epsilon, first=first)

    def construct(
        self, hidden: Tensor, residual: Tensor, gamma: Tensor, step: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """hidden, residual [T, in_features], gamma [in_features] -> [T, out_features], and the sum [T, in_features]."""
        out, total = self.norm_linear(hidden, residual, gamma, self.operands(), self.bias, step)
        return out, total


def _bias(ops: OpTable, size: int, *, biased: bool) -> Tensor | None:
    return unbound_parameter((size,), ops.dtype) if biased and not ops.traits.packs_weights else None
