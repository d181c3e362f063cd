"""Which op table a config means. A device's code is imported only when it is chosen."""

from __future__ import annotations

from agent.backends.base import OpTable
from llm_serving.config import Config
from llm_serving.errors import AgentStartError


def select_op_table(config: Config) -> OpTable:
    """The table of ``config.device`` and ``config.op_table``. Raises AgentStartError when there is none."""
    if config.device == "Ascend":
        from agent.backends.ascend.ops import AscendOps

        return AscendOps(config)
    if config.op_table == "native":
        from agent.backends.native.ops import NativeOps

        return NativeOps(config.model_config.model_dtype, config.max_blocks_per_seq * config.pa_config.block_size)
    if config.op_table == "fused":
        from agent.backends.cpu.ops import FusedCpuOps

        return FusedCpuOps(config)
    raise AgentStartError(f"op table {config.op_table!r} of device {config.device!r} is not known")
