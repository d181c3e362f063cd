"""The native op table on a CPU: the primitives, behind which our kernels multiply by packed copies of the weights."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from agent.backends.base import BlockMoves, CacheLayout, Operator
from agent.backends.cpu.agreement import all_agree
from agent.backends.cpu.blocks import HostBlockMoves
from agent.backends.native.linear import is_transposed
from agent.backends.native.ops import NativeOps
from agent.group.model_part import ModelPart
from agent.kernels import hold_failures, set_attentive, take_failure
from agent.kernels.primitive_weights import KeptWeights, PrimitiveWeight
from agent.weights.forms import LinearForms, scale_type
from agent.weights.packed import OUTPUT_LAYER
from agent.weights.storage import Array
from llm_serving.model.families import Experts

_EMBEDDING = "embedding.weight"
_LINEAR_WEIGHTS = ("qkv.weight", "output.weight", "gate_up.weight", "down.weight", OUTPUT_LAYER)
"""Ends of the names of what is multiplied by, of experts in three dimensions."""


class NativeCpuOps(NativeOps):
    """Owns the packed copies."""

    def __init__(
        self, dtype: str, max_positions: int, part: ModelPart | None = None, forms: LinearForms | None = None
    ) -> None:
        super().__init__(dtype, max_positions, part, forms)
        self._multiplies_experts = False
        self._kept = KeptWeights()
        weakref.finalize(self, self._kept.close)
        hold_failures(True)

    def set_running(self, running: bool) -> None:
        """Between operators the kernels' threads would fall asleep, and wake again in as long as a short one takes."""
        set_attentive(running)

    @property
    def replays_steps(self) -> bool:
        return True

    def stage_agrees(self, says_so: bool) -> bool:
        return all_agree(self.part, says_so)

    def expert_mlp(self, width: int, experts: Experts, epsilon: float) -> Operator:
        self._multiplies_experts = True
        return super().expert_mlp(width, experts, epsilon)

    def failed_operator(self) -> str | None:
        return take_failure()

    def block_moves(self, arrays: Sequence[Array], parameters: Sequence[Any], host: CacheLayout) -> BlockMoves:
        return HostBlockMoves(arrays, host)

    def take_weights(self, weights: Mapping[str, Array], *, tied: bool) -> None:
        for name, array in weights.items():
            if name.endswith(_LINEAR_WEIGHTS) and (array.ndim == 2 or self._multiplies_experts):
                self._kept.keep(self._described(name, weights), release=True)
        if tied:
            self._kept.keep(PrimitiveWeight(weights[_EMBEDDING], self.dtype), release=False)

    def _described(self, name: str, weights: Mapping[str, Array]) -> PrimitiveWeight:
        stem, of_experts = name.removesuffix(".weight"), weights[name].ndim == 3
        form = self.forms.output if name == OUTPUT_LAYER else self.forms.experts if of_experts else self.forms.layers
        if form.is_float:
            return PrimitiveWeight(weights[name], self.dtype, transposed=not of_experts)
        return PrimitiveWeight(
            values=weights[name],
            type=form.weights.stored_as,
            transposed=is_transposed(form) and not of_experts,
            scales=weights[f"{stem}.scale"],
            offsets=weights.get(f"{stem}.offset"),
            scale_type=scale_type(form, self.dtype, of_experts=of_experts),
            group=form.group,
            float_products=not form.quantises_activations,
        )
