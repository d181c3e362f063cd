"""The native op table on a CPU. Its operators are MindSpore's primitives. The project's kernels compute these
primitives from packed weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from agent.backends.base import CacheLayout, Operator
from agent.backends.cpu.blocks import HostBlockMoves
from agent.backends.device import BlockMoves, DeviceHooks, DeviceTraits
from agent.backends.native.linear import is_transposed
from agent.backends.native.ops import NativeOps
from agent.group.model_part import ModelPart
from agent.kernels import OperatorRefusedError, hold_failures, set_attentive, take_failure
from agent.kernels.laid_out_caches import LaidOutCaches, lays_out
from agent.kernels.primitive_weights import KeptWeights, PrimitiveWeight
from agent.lora.stacked import StackedSizes
from agent.weights.forms import LinearForms, scale_type
from agent.weights.packed import OUTPUT_LAYER
from agent.weights.storage import Array
from llm_serving.model.families import Experts

_EMBEDDING = "embedding.weight"
_LINEAR_WEIGHTS = ("qkv.weight", "output.weight", "gate_up.weight", "down.weight", "projection.weight", OUTPUT_LAYER)
"""Endings of the names of all linear weights except those of latent attention. The weights of experts have the same
endings, and one more axis for the expert."""
_LATENT_WEIGHTS = tuple(f"attention.{name}.weight" for name in ("joined", "query", "key_up", "value_up"))
"""Endings of the names of latent attention's linear weights."""
_GATED_WEIGHT = "gate_up.weight"
"""Ending of the names of weights whose outputs are the two halves that Swiglu joins."""
_HEAD_WEIGHTS = _LATENT_WEIGHTS[2:]
"""Endings of the names of weights that have one matrix for each head. These weights stay floats in every weight format.
"""


class NativeCpuOps(NativeOps):
    """The native table for a CPU. It copies blocks in host memory and has the hooks ``NativeCpuHooks``."""

    traits: ClassVar[DeviceTraits] = replace(NativeOps.traits, replays_steps=True)
    hooks: NativeCpuHooks

    def __init__(
        self,
        dtype: str,
        max_positions: int,
        part: ModelPart | None = None,
        forms: LinearForms | None = None,
        *,
        int8_cache: bool = False,
        adapters: StackedSizes | None = None,
    ) -> None:
        hooks = NativeCpuHooks(dtype, forms or LinearForms())
        super().__init__(dtype, max_positions, part, forms, hooks, int8_cache=int8_cache, adapters=adapters)
        # The primitives of an int8 cache, and those of attention with sinks, need the elements in their own order.
        hooks.lays_out_caches = dtype == "bfloat16" and not int8_cache and not self._has_sinks

    def expert_mlp(self, width: int, experts: Experts, epsilon: float) -> Operator:
        self.hooks.packs_experts = True
        return super().expert_mlp(width, experts, epsilon)

    def block_moves(
        self,
        arrays: Sequence[Array],
        parameters: Sequence[Any],
        host: CacheLayout,
        pool: Sequence[Array] | None = None,
    ) -> BlockMoves:
        return HostBlockMoves(arrays, host, pool)


class NativeCpuHooks(DeviceHooks):
    """Packs the weights for the project's kernels and owns the packed weights.

    Keeps the kernels' threads awake while a graph runs. Raises an error if an operator has refused its inputs.
    """

    def __init__(self, dtype: str, forms: LinearForms) -> None:
        self._dtype, self._forms = dtype, forms
        self.packs_experts = False
        """Whether the model multiplies expert weights through ``NativeOps.expert_mlp``."""
        self.lays_out_caches = False
        """Whether only ReshapeAndCache and PagedAttention access the elements of the KV cache, and in bfloat16."""
        self._kept, self.laid_out_caches = KeptWeights(), LaidOutCaches()
        weakref.finalize(self, self._kept.close)
        weakref.finalize(self, self.laid_out_caches.close)
        hold_failures(True)

    @contextmanager
    def graph_run(self, *, compiles: bool = False) -> Iterator[None]:
        # The kernels' threads must not sleep between operators, because waking them takes as long as a short operator.
        set_attentive(not compiles)
        try:
            yield
        except BaseException:
            take_failure()  # clears the recorded failure, so that the next run does not report it
            raise
        finally:
            set_attentive(False)
        failed = take_failure()
        if failed is not None:
            raise OperatorRefusedError(f"{failed} refused its inputs; the reason is in the agent's log")

    def take_weights(self, weights: Mapping[str, Array], *, tied: bool) -> None:
        for name, array in weights.items():
            is_linear = name.endswith(_LINEAR_WEIGHTS) and (array.ndim == 2 or self.packs_experts)
            if is_linear or name.endswith(_LATENT_WEIGHTS):
                self._kept.keep(self._described(name, weights), release=True)
        if tied:
            self._kept.keep(PrimitiveWeight(weights[_EMBEDDING], self._dtype), release=False)

    def take_caches(self, caches: Mapping[str, Array]) -> None:
        for name, array in caches.items():
            has_heads = name.endswith((".key_cache", ".value_cache")) and array.ndim == 4
            if self.lays_out_caches and has_heads and lays_out(array.shape[1], array.shape[3]):
                self.laid_out_caches.add(array)

    def _described(self, name: str, weights: Mapping[str, Array]) -> PrimitiveWeight:
        stem, of_experts = name.removesuffix(".weight"), weights[name].ndim == 3
        gated = name.endswith(_GATED_WEIGHT) and not of_experts
        if name.endswith(_HEAD_WEIGHTS):
            return PrimitiveWeight(weights[name], self._dtype, transposed=False)
        forms = self._forms
        form = forms.output if name == OUTPUT_LAYER else forms.experts if of_experts else forms.layers
        if form.is_float:
            return PrimitiveWeight(weights[name], self._dtype, transposed=not of_experts, gated=gated)
        return PrimitiveWeight(
            values=weights[name],
            type=form.weights.stored_as,
            transposed=is_transposed(form) and not of_experts,
            scales=weights[f"{stem}.scale"],
            offsets=weights.get(f"{stem}.offset"),
            scale_type=scale_type(form, self._dtype, of_experts=of_experts),
            group=form.group,
            float_products=not form.quantises_activations,
            sum_offsets=weights.get(f"{stem}.sum_offset"),
            gated=gated,
        )
