"""Linear layers without bias."""

from __future__ import annotations

from mindspore import Tensor, nn

from agent.backends.base import OpTable


class Linear(nn.Cell):
    """``y = x @ weight.T``."""

    def __init__(self, ops: OpTable, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = ops.linear_weight(in_features, out_features)
        self.linear = ops.linear(out_features)

    def construct(self, x: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        """x [T, in_features] -> [T, out_features]."""
        return self.linear(x, self.weight, step)


class NormLinear(nn.Cell):
    """Adds a block's output to the residual stream, normalises the sum (``gamma`` comes from outside) and multiplies:
    ``y = RMSNorm(hidden + residual) @ weight.T``."""

    def __init__(self, ops: OpTable, in_features: int, out_features: int, epsilon: float, *, first: bool) -> None:
        super().__init__()
        self.weight = ops.linear_weight(in_features, out_features)
        self.norm_linear = ops.norm_linear(out_features, epsilon, first=first)

    def construct(
        self, hidden: Tensor, residual: Tensor, gamma: Tensor, step: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """hidden, residual [T, in_features], gamma [in_features] -> [T, out_features], the sum [T, in_features]."""
        out, total = self.norm_linear(hidden, residual, gamma, self.weight, step)
        return out, total


class Weight(nn.Cell):
    """A linear layer's weight alone, for an operator that runs several layers at once."""

    def __init__(self, ops: OpTable, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = ops.linear_weight(in_features, out_features)
