"""RMSNorm (Zhang and Sennrich 2019)."""

from __future__ import annotations

from mindspore import Tensor, nn

from agent.backends.base import OpTable
from agent.layers.parameter import unbound_parameter


class RMSNorm(nn.Cell):
    """``y = x / sqrt(mean(x^2) + epsilon) * weight``."""

    def __init__(self, ops: OpTable, hidden_size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = unbound_parameter((hidden_size,), ops.dtype)
        self.norm = ops.rms_norm(epsilon)

    def construct(self, x: Tensor) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        return self.norm(x, self.weight)


class AddRMSNorm(nn.Cell):
    """Adds a block's output to the residual stream and normalises the sum."""

    def __init__(self, ops: OpTable, hidden_size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = unbound_parameter((hidden_size,), ops.dtype)
        self.add_norm = ops.add_rms_norm(epsilon)

    def construct(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x, residual [T, hidden_size] -> norm of the sum, the sum."""
        normed, total = self.add_norm(x, residual, self.weight)
        return normed, total
