"""RMSNorm (Zhang and Sennrich 2019): ``y = x / sqrt(mean(x^2) + epsilon) * weight``."""

from __future__ import annotations

from mindspore import nn

from agent.backends.base import OpTable
from agent.layers.parameter import unbound_parameter


class NormWeight(nn.Cell):
    """The weight of a norm. The operator of the following linear layer also computes the norm."""

    def __init__(self, ops: OpTable, size: int) -> None:
        super().__init__()
        self.weight = unbound_parameter((size,), ops.dtype)
