"""A mixture of experts instead of the MLP (Shazeer et al. 2017; Qwen3, Yang et al. 2025)."""

from __future__ import annotations

from mindspore import Tensor, nn

from agent.backends.base import OpTable
from agent.layers.linear import Weight
from llm_serving.model.families import Experts


class ExpertMLP(nn.Cell):
    """Sends each token through ``per_token`` gated MLPs, which the router chooses, and adds their weighted outputs.

    The weights are the router's softmax over all experts. The router is float32. The agents of a stage share the
    columns of every expert."""

    def __init__(self, ops: OpTable, hidden_size: int, experts: Experts, epsilon: float) -> None:
        super().__init__()
        self.router = Weight((ops.router_weight(hidden_size, experts.count), None, None))
        inner = experts.intermediate_size
        self.gate_up = Weight(ops.expert_weight(experts.count, hidden_size, 2 * inner))
        self.down = Weight(ops.expert_weight(experts.count, inner, hidden_size))
        self.mlp = ops.expert_mlp(hidden_size, experts, epsilon)
        self.sum = ops.all_reduce(hidden_size) if ops.is_split else None

    def construct(
        self, hidden: Tensor, residual: Tensor, gamma: Tensor, step: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """hidden, residual [T, hidden_size], gamma [hidden_size] -> the experts of the normalised sum, and the sum."""
        weights = (self.router.weight, self.gate_up.operands(), self.down.operands())
        out, total = self.mlp(hidden, residual, gamma, weights, step)
        return (out if self.sum is None else self.sum(out, step)), total
