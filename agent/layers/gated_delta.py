"""Gated DeltaNet (Yang et al. 2024): linear attention. Each sequence has a state of fixed size instead of a KV cache.
"""

from __future__ import annotations

from mindspore import Tensor, nn

from agent.backends.base import OpTable
from agent.layers.linear import NormLinear, NormWeight, RowParallelLinear
from agent.layers.parameter import unbound_parameter
from llm_serving.model.shape import ModelShape


class GatedDeltaNet(nn.Cell):
    """Gated DeltaNet of one layer, with the norm before it.

    The layer owns the parameter of the states. ``agent.kv_cache`` allocates its memory.
    """

    def __init__(self, ops: OpTable, shape: ModelShape, *, layer: int) -> None:
        super().__init__()
        delta = shape.delta
        assert delta is not None, "only a hybrid model has this layer"
        self.projection = NormLinear(
            ops, shape.hidden_size, delta.projected, shape.rms_norm_eps, first=layer == 0
        )
        self.convolution = unbound_parameter((delta.channels, 1, delta.taps), "float32")
        self.log_rate = unbound_parameter((delta.value_heads,), "float32")
        self.rate_bias = unbound_parameter((delta.value_heads,), "float32")
        self.norm = NormWeight(ops, delta.value_dim, "float32")
        self.states = unbound_parameter(*ops.state_layout(delta))
        self.delta = ops.gated_delta(delta, shape.rms_norm_eps)
        self.output = RowParallelLinear(ops, delta.values, shape.hidden_size)

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        rotary: tuple[Tensor, ...],
        step: tuple[Tensor, ...],
        whole_prompts: bool,
    ) -> tuple[Tensor, Tensor]:
        """Returns Gated DeltaNet of RMSNorm(hidden + residual), and hidden + residual, both [tokens, hidden_size].

        ``gamma`` [hidden_size] is the norm's weight. ``OpTable`` describes ``step``. ``rotary`` and ``whole_prompts``
        are ignored.
        """
        projected, residual = self.projection(hidden, residual, gamma, step)
        weights = (self.convolution, self.log_rate, self.rate_bias, self.norm.weight)
        return self.output(self.delta(projected, weights, self.states, step), step), residual
