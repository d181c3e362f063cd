"""Implements the parts of Gemma 3 (arXiv:2503.19786) that the native op table composes of several primitives.

The weights of Gemma's norms are float32. With activations of 16 bits, RmsNorm accepts float32 weights, but AddRmsNorm
does not (docs/lab/ascend.md). There is no primitive for a gate with GELU.
"""

from __future__ import annotations

from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import GeluExt, RmsNorm, SplitWithSize


class AddThenNorm(nn.Cell):
    """Returns RMSNorm(hidden + residual) and hidden + residual, with float32 weights ``gamma``."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.add, self.norm = ops.Add(), RmsNorm(epsilon)

    def construct(self, hidden: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        total = self.add(hidden, residual)
        return self.norm(total, gamma)[0], total


class ResultNorm(nn.Cell):
    """Applies RMSNorm to the result of attention or of the MLP (``OpTable.result_norm``)."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.norm = RmsNorm(epsilon)

    def construct(self, x: Tensor, gamma: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        return self.norm(x, gamma)[0]


class GatedGelu(nn.Cell):
    """Returns gelu(gate) * up (GeGLU, Shazeer 2020), with the tanh approximation of GELU.

    The first half of each row of the input is the gate, and the second half is up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.split, self.gelu, self.multiply, self.shape = SplitWithSize(), GeluExt(), ops.Mul(), ops.Shape()

    def construct(self, both: Tensor) -> Tensor:
        width = self.shape(both)[1] // 2
        gate, up = self.split(both, (width, width), -1)
        return self.multiply(self.gelu(gate, "tanh"), up)
