"""Linear layers without bias."""

from __future__ import annotations

from mindspore import Tensor, nn

from agent.backends.base import OpTable
from agent.layers.parameter import unbound_parameter


class Linear(nn.Cell):
    """``y = x @ weight.T``; weight [out_features, in_features] as in a checkpoint."""

    def __init__(self, ops: OpTable, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = unbound_parameter((out_features, in_features), ops.dtype)
        self.linear = ops.linear()

    def construct(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, out_features]."""
        return self.linear(x, self.weight)
