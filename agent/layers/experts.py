"""A mixture of experts in place of the MLP (Shazeer et al. 2017; Qwen3, Yang et al. 2025)."""

from __future__ import annotations

from mindspore import Tensor, nn

from agent.backends.base import OpTable
from llm_serving.model_families import Experts


class ExpertMLP(nn.Cell):
    """Each token goes through the ``per_token`` gated MLPs that the router likes best, weighted by its softmax over
    all of them; router and weights are float32. Each agent of a stage has some columns of every expert."""

    def __init__(self, ops: OpTable, hidden_size: int, experts: Experts, epsilon: float) -> None:
        super().__init__()
        self.router = _Parameter(ops.router_weight(hidden_size, experts.count))
        inner = experts.intermediate_size
        self.gate_up = _Parameter(ops.expert_weight(experts.count, hidden_size, 2 * inner))
        self.down = _Parameter(ops.expert_weight(experts.count, inner, hidden_size))
        self.mlp = ops.expert_mlp(hidden_size, experts, epsilon)
        self.sum = ops.all_reduce(hidden_size) if ops.is_split else None

    def construct(
        self, hidden: Tensor, residual: Tensor, gamma: Tensor, step: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """hidden, residual [T, hidden_size], gamma [hidden_size] -> the experts' sum of the normalised sum, the sum."""
        weights = (self.router.weight, self.gate_up.weight, self.down.weight)
        out, total = self.mlp(hidden, residual, gamma, weights, step)
        return (out if self.sum is None else self.sum(out, step)), total


class _Parameter(nn.Cell):
    """A weight alone."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
