"""The Ascend's op table: the native one, with what its kernels take beyond what the CPU's do."""

from __future__ import annotations

from agent.backends.ascend.limits import check_limits
from agent.backends.native.ops import NativeOps
from llm_serving.config import Config


class AscendOps(NativeOps):
    """The native table in the form an Ascend runs it: any number of prompts in a step of whole prompts."""

    dynamic_prompts = True

    def __init__(self, config: Config) -> None:
        """Raises AgentStartError when the kernels cannot do what ``config`` says."""
        check_limits(config)
        super().__init__(config.model_config.model_dtype, config.max_blocks_per_seq * config.pa_config.block_size)
