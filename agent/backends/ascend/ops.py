"""The op table of the Ascend: the native table, adapted to the limits of the Ascend's kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import mindspore

from agent.backends.ascend.adapters import DeviceMatrices
from agent.backends.ascend.blocks import DeviceBlockMoves
from agent.backends.ascend.launches import AscendHooks
from agent.backends.ascend.limits import check_limits
from agent.backends.base import AttentionForm, CacheLayout, Operator
from agent.backends.device import BlockMoves, DeviceTraits
from agent.backends.native.ops import NativeOps
from agent.group.model_part import ModelPart
from agent.lora.stacked import StackedMatrices, StackedSizes
from agent.weights.forms import LinearForms
from agent.weights.storage import Array
from llm_serving.config import Config


class AscendOps(NativeOps):
    """The native op table for an Ascend. It keeps weights and caches in the device's memory, and does not pad whole
    prompts. The native table for a CPU uses host memory and pads whole prompts.

    On an Ascend, only attention with sinks supports a window. For other models with a window, ``check_limits`` requires
    that no sequence can become longer than the window.
    """

    traits: ClassVar[DeviceTraits] = replace(
        NativeOps.traits, pads_whole_prompts=False, own_memory=True, runs_ahead=True
    )

    def __init__(self, config: Config, part: ModelPart | None = None, forms: LinearForms | None = None) -> None:
        """Raises AgentStartError if the kernels do not support ``config``."""
        check_limits(config)
        positions = config.max_blocks_per_seq * config.pa_config.block_size
        # These hooks start the copies of results to the host immediately after the launch. Without them, the copies
        # start only when the host fetches the results.
        hooks = AscendHooks(mindspore) if part is None or part.may_run_ahead else None
        dtype, int8_cache, adapters = (
            config.model_config.model_dtype,
            config.gathers_blocks,
            StackedSizes.of_config(config),
        )
        super().__init__(dtype, positions, part, forms, hooks, int8_cache=int8_cache, adapters=adapters)

    def adapter_memory(self, parameters: Mapping[str, Any]) -> StackedMatrices:
        return DeviceMatrices(parameters)

    def block_moves(
        self,
        arrays: Sequence[Array],
        parameters: Sequence[Any],
        host: CacheLayout,
        pool: Sequence[Array] | None = None,
    ) -> BlockMoves:
        return DeviceBlockMoves(parameters, host, pool)

    def rotary(self, cos: Array, sin: Array, window: int) -> Operator:
        return super().rotary(cos, sin, window if self._has_sinks else 0)

    def attention(self, form: AttentionForm) -> Operator:
        return super().attention(form if form.sinks else replace(form, window=0))
