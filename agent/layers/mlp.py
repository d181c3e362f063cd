"""The two kinds of MLP: the gated MLP (SwiGLU, Shazeer 2020), and a mixture of experts (Shazeer et al. 2017)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mindspore import Tensor, nn

from agent.backends.base import LinearParameters, OpTable
from agent.layers.linear import Weight
from agent.layers.parameter import unbound_parameter
from llm_serving.model.families import Experts


class GatedMLP(nn.Cell):
    """Computes ``down(silu(gate(x)) * up(x))``, with the norm before it. Gate and up are one matrix product.

    The intermediate columns are divided among the agents of a stage, and the result is summed over the agents.
    """

    def __init__(self, ops: OpTable, hidden_size: int, intermediate_size: int, epsilon: float) -> None:
        super().__init__()
        self.gate_up = Weight(
            ops.linear_weight(hidden_size, 2 * intermediate_size),
            ops.adapter_matrices(hidden_size, 2 * intermediate_size, num_layers=2),
        )
        self.down = Weight(
            ops.linear_weight(intermediate_size, hidden_size), ops.adapter_matrices(intermediate_size, hidden_size)
        )
        self.mlp = ops.gated_mlp(hidden_size, epsilon)
        self.sum = ops.all_reduce(hidden_size) if ops.is_split else None

    def construct(
        self, hidden: Tensor, residual: Tensor, gamma: Tensor, step: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Returns the MLP of RMSNorm(hidden + residual), and hidden + residual, both [tokens, hidden_size]."""
        out, total = self.mlp(hidden, residual, gamma, self.gate_up.operands(), self.down.operands(), step)
        return (out if self.sum is None else self.sum(out, step)), total


class ExpertMLP(nn.Cell):
    """A mixture of experts: a router sends each token to a few gated MLPs, and their weighted outputs are added.

    An expert's weight in this sum is the router's float32 softmax over all experts, unless ``Experts.routing`` defines
    another rule. Shared experts are one more gated MLP for every token (DeepSeekMoE, Dai et al. 2024). Either the
    columns of every expert are divided among the agents of a stage, or each agent has some whole experts.
    """

    def __init__(self, ops: OpTable, hidden_size: int, experts: Experts, epsilon: float) -> None:
        super().__init__()
        inner, held, biased = experts.intermediate_size, experts.held, experts.biased
        adds_down_bias = biased and (ops.is_first or experts.num_held is not None)
        router_bias = ops.router_bias(experts.count) if biased else None
        gate_up_bias = ops.expert_bias(held, 2 * inner) if biased else None
        down_bias = ops.expert_bias(held, hidden_size) if adds_down_bias else None
        self.router = Weight(LinearParameters(ops.router_weight(hidden_size, experts.count), bias=router_bias))
        self.gate_up = Weight(replace(ops.expert_weight(held, hidden_size, 2 * inner), bias=gate_up_bias))
        self.down = Weight(replace(ops.expert_weight(held, inner, hidden_size), bias=down_bias))
        self.has_biases = router_bias is not None
        self.is_corrected = experts.routing is not None and experts.routing.corrected
        self.has_shared = experts.shared_size > 0
        if self.is_corrected:
            self.correction = unbound_parameter((experts.count,), "float32")
        if self.has_shared:
            self.shared_gate_up = Weight(ops.linear_weight(hidden_size, 2 * experts.shared_size))
            self.shared_down = Weight(ops.linear_weight(experts.shared_size, hidden_size))
        self.has_shared_gate = experts.shared_gate
        if self.has_shared_gate:
            self.shared_gate = Weight(LinearParameters(ops.router_weight(hidden_size, 1)))
        self.mlp = ops.expert_mlp(hidden_size, experts, epsilon)
        self.sum = ops.all_reduce(hidden_size) if ops.is_split else None

    def construct(
        self, hidden: Tensor, residual: Tensor, gamma: Tensor, step: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Returns the experts' output for RMSNorm(hidden + residual), and hidden + residual.

        Both are [tokens, hidden_size].
        """
        weights: tuple[Any, ...] = (self.router.weight, self.gate_up.operands(), self.down.operands())
        if self.is_corrected:
            weights = (*weights, self.correction)
        if self.has_shared:
            weights = (*weights, self.shared_gate_up.operands(), self.shared_down.operands())
        if self.has_shared_gate:
            weights = (*weights, self.shared_gate.weight)
        if self.has_biases:
            weights = (*weights, self.router.bias, self.gate_up.bias, self.down.bias)
        out, total = self.mlp(hidden, residual, gamma, weights, step)
        return (out if self.sum is None else self.sum(out, step)), total
