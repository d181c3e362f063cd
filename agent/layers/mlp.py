"""The gated MLP of Llama (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

from mindspore import Tensor, nn

from agent.backends.base import OpTable
from agent.layers.linear import Linear


class GatedMLP(nn.Cell):
    """``down(silu(gate(x)) * up(x))``, gate and up being one matrix product."""

    def __init__(self, ops: OpTable, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up = Linear(ops, hidden_size, 2 * intermediate_size)
        self.activation = ops.swiglu()
        self.down = Linear(ops, intermediate_size, hidden_size)

    def construct(self, x: Tensor) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        return self.down(self.activation(self.gate_up(x)))
