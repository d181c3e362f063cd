"""The gated MLP of Llama (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

from mindspore import Tensor, nn

from agent.backends.base import OpTable
from agent.layers.linear import Weight


class GatedMLP(nn.Cell):
    """``down(silu(gate(x)) * up(x))`` of the normalised residual stream. Gate and up are one matrix product.

    The agents of a stage share the intermediate columns, and the result is summed over the agents."""

    def __init__(self, ops: OpTable, hidden_size: int, intermediate_size: int, epsilon: float) -> None:
        super().__init__()
        self.gate_up = Weight(ops.linear_weight(hidden_size, 2 * intermediate_size))
        self.down = Weight(ops.linear_weight(intermediate_size, hidden_size))
        self.mlp = ops.gated_mlp(hidden_size, epsilon)
        self.sum = ops.all_reduce(hidden_size) if ops.is_split else None

    def construct(
        self, hidden: Tensor, residual: Tensor, gamma: Tensor, step: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """hidden, residual [T, hidden_size], gamma [hidden_size] -> the MLP of the normalised sum, and the sum."""
        out, total = self.mlp(hidden, residual, gamma, self.gate_up.operands(), self.down.operands(), step)
        return (out if self.sum is None else self.sum(out, step)), total
