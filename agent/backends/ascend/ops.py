"""The Ascend's op table: the native one, with what its kernels take beyond what the CPU's do, and without what they
have not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agent.backends.ascend.blocks import DeviceBlockMoves
from agent.backends.ascend.limits import check_limits
from agent.backends.base import AttentionForm, BlockMoves, CacheLayout, Operator
from agent.backends.native.ops import NativeOps
from agent.group.model_part import ModelPart
from agent.weights.forms import LinearForms
from agent.weights.storage import Array
from llm_serving.config import Config


class AscendOps(NativeOps):
    """The native table in the form an Ascend runs it: any number of prompts in a step of whole prompts, and no windows,
    which no sequence outgrows (``check_limits``)."""

    dynamic_prompts = True

    def __init__(self, config: Config, part: ModelPart | None = None, forms: LinearForms | None = None) -> None:
        """Raises AgentStartError when the kernels cannot do what ``config`` says."""
        check_limits(config)
        positions = config.max_blocks_per_seq * config.pa_config.block_size
        super().__init__(config.model_config.model_dtype, positions, part, forms)

    def block_moves(self, arrays: Sequence[Array], parameters: Sequence[Any], host: CacheLayout) -> BlockMoves:
        return DeviceBlockMoves(parameters, host)

    def rotary(self, cos: Array, sin: Array, window: int) -> Operator:
        return super().rotary(cos, sin, 0)

    def attention(self, form: AttentionForm) -> Operator:
        return super().attention(replace(form, window=0))
