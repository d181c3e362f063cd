"""Which op table a config means. A device's code is imported only when it is chosen."""

from __future__ import annotations

from agent.backends.base import OpTable
from agent.group.model_part import ModelPart
from agent.weights.forms import LinearForms
from llm_serving.config import Config
from llm_serving.errors import AgentStartError


def select_op_table(config: Config, part: ModelPart | None = None, *, forms: LinearForms | None = None) -> OpTable:
    """The table of ``config.device`` and ``config.op_table`` for a part of the model, whose sizes ``config`` has (None:
    the whole), and for weights in these ``forms`` (native tables; None: floats). Raises AgentStartError when there is
    none."""
    if config.device == "Ascend":
        from agent.backends.ascend.ops import AscendOps

        return AscendOps(config, part, forms)
    if config.op_table == "native":
        from agent.backends.cpu.native import NativeCpuOps

        positions = config.max_blocks_per_seq * config.pa_config.block_size
        return NativeCpuOps(config.model_config.model_dtype, positions, part, forms)
    if config.op_table == "fused":
        from agent.backends.cpu.ops import FusedCpuOps

        return FusedCpuOps(config, part)
    raise AgentStartError(f"op table {config.op_table!r} of device {config.device!r} is not known")
