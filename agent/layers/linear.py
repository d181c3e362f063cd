"""Linear layers, and the weights of norms.

A packed weight includes its bias and scales. If weights are not packed, biases and scales are separate parameters.
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn

from agent.backends.base import LinearParameters, OpTable
from agent.layers.parameter import unbound_parameter


class Weight(nn.Cell):
    """The parameters of one linear weight: the weight itself, its scales and its offsets. Weights of floats have no
    scales.

    If ``OpTable.adapter_matrices`` makes matrices of LoRA adapters, these matrices are also parameters of the weight.
    """

    def __init__(self, parameters: LinearParameters, adapters: tuple[Any, Any] | None = None) -> None:
        super().__init__()
        self.weight, self.scale, self.offset = parameters.weight, parameters.scale, parameters.offset
        self.input_scale, self.input_offset = parameters.input_scale, parameters.input_offset
        self.sum_offset, self.bias = parameters.sum_offset, parameters.bias
        self.is_adapted = adapters is not None
        if adapters is not None:
            self.adapter_a, self.adapter_b = adapters

    def operands(self) -> Any:
        """Returns the weight as operators take it: alone, or in a tuple with its scales and offsets.

        With adapters, returns a tuple: the weight as described, then the adapters' matrices A and B.
        """
        return (self.weights(), self.adapter_a, self.adapter_b) if self.is_adapted else self.weights()

    def weights(self) -> Any:
        """Returns the weight with its scales and offsets, but without the matrices of adapters."""
        if self.scale is None:
            return self.weight
        if self.sum_offset is not None:
            return (self.weight, self.scale, self.input_scale, self.input_offset, self.sum_offset)
        return (self.weight, self.scale) if self.offset is None else (self.weight, self.scale, self.offset)


class RowParallelLinear(Weight):
    """A linear layer ``y = x @ weight.T + bias`` whose input columns are divided among the agents of a stage.

    Each agent multiplies its columns, and the products are summed over the agents. Only the first agent adds the bias.
    """

    def __init__(self, ops: OpTable, in_features: int, out_features: int, *, biased: bool = False) -> None:
        super().__init__(
            ops.linear_weight(in_features, out_features), ops.adapter_matrices(in_features, out_features)
        )
        self.bias = _bias(ops, out_features, biased=biased and ops.is_first)
        self.linear = ops.linear(out_features)
        self.sum = ops.all_reduce(out_features) if ops.is_split else None

    def construct(self, x: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        """Returns ``x @ weight.T + bias`` [tokens, out_features] for ``x`` [tokens, in_features]."""
        out = self.linear(x, self.operands(), self.bias, step)
        return out if self.sum is None else self.sum(out, step)


class NormLinear(Weight):
    """A linear layer with the norm before it: ``y = RMSNorm(hidden + residual) @ weight.T + bias``."""

    def __init__(
        self,
        ops: OpTable,
        in_features: int,
        out_features: int,
        epsilon: float,
        *,
        first: bool,
        biased: bool = False,
        num_layers: int = 1,
    ) -> None:
        """``num_layers`` is the number of checkpoint layers that this layer joins, for example 3 for q, k and v."""
        super().__init__(
            ops.linear_weight(in_features, out_features),
            ops.adapter_matrices(in_features, out_features, num_layers),
        )
        self.bias = _bias(ops, out_features, biased=biased)
        self.norm_linear = ops.norm_linear(out_features, epsilon, first=first)

    def construct(
        self, hidden: Tensor, residual: Tensor, gamma: Tensor, step: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Returns the layer's output [tokens, out_features], and hidden + residual [tokens, in_features].

        ``gamma`` [in_features] is the weight of the norm.
        """
        out, total = self.norm_linear(hidden, residual, gamma, self.operands(), self.bias, step)
        return out, total


class NormWeight(nn.Cell):
    """The weight of an RMSNorm (Zhang and Sennrich 2019). The operator of the following linear layer computes the norm.
    """

    def __init__(self, ops: OpTable, size: int, dtype: str | None = None) -> None:
        """``dtype`` is the type of the weight. None means the type of the activations."""
        super().__init__()
        self.weight = unbound_parameter((size,), dtype or ops.dtype)


def _bias(ops: OpTable, size: int, *, biased: bool) -> Tensor | None:
    return unbound_parameter((size,), ops.dtype) if biased and not ops.holds_biases else None
