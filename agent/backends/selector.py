"""Selects the op table of a config. Imports the code of the selected device only."""

from __future__ import annotations

from agent.backends.base import OpTable
from agent.group.model_part import ModelPart
from agent.lora.stacked import StackedSizes
from agent.weights.forms import LinearForms
from llm_serving.config import Config
from llm_serving.errors import AgentStartError


def select_op_table(config: Config, part: ModelPart | None = None, *, forms: LinearForms | None = None) -> OpTable:
    """Makes the op table of ``config.device`` and ``config.op_table``.

    ``part`` is this agent's part of the model, or None for the whole model. ``config`` must have the sizes of this
    part. ``forms`` describes the weights for a native table. None means that all weights are floats. Raises
    AgentStartError if the device has no table of that name.
    """
    if config.device == "Ascend":
        from agent.backends.ascend.ops import AscendOps

        return AscendOps(config, part, forms)
    if config.op_table == "native":
        from agent.backends.cpu.native import NativeCpuOps

        positions = config.max_blocks_per_seq * config.pa_config.block_size
        dtype, int8_cache, adapters = (
            config.model_config.model_dtype,
            config.gathers_blocks,
            StackedSizes.of_config(config),
        )
        return NativeCpuOps(dtype, positions, part, forms, int8_cache=int8_cache, adapters=adapters)
    if config.op_table == "fused":
        from agent.backends.cpu.ops import FusedCpuOps

        return FusedCpuOps(config, part)
    raise AgentStartError(f"device {config.device!r} has no op table {config.op_table!r}")
