"""The Ascend's op table, which this version does not have yet."""

from __future__ import annotations

from agent.backends.base import OpTable
from llm_serving.errors import AgentStartError


def ascend_ops(dtype: str) -> OpTable:
    """Raises AgentStartError: the native table's primitives are an Ascend's, but formats, masks and context flags of
    the device are not set up yet, and a graph that has not run on one is not offered."""
    raise AgentStartError(
        f"the Ascend backend ({dtype}) is not available in this version; set model_config.device_target: CPU "
        "(with op_table: native the same graph of Ascend primitives runs on the CPU)"
    )
