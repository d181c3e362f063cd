"""Makes the HCCL groups through which the agents of a group on Ascends communicate. The communication primitives of the
graph name these HCCL groups.

The server starts the agents as one cluster (``llm_serving/executor/hccl_cluster.py``). Each agent joins the cluster by
MindSpore's ``init``. Its HCCL rank is the agent's number in its group. Sources: docs/ascend.md.
"""

from __future__ import annotations

from typing import Any

from agent.group.model_part import STAGE_GROUP, ModelPart
from llm_serving.errors import AgentStartError


def join_group(part: ModelPart, mindspore: Any) -> None:
    """Adds this agent to two communication groups of HCCL: all agents of its group, and the agents of its stage. Does
    nothing if the agent has no group.

    Raises AgentStartError if HCCL cannot connect the agents.
    """
    if part.is_alone:
        return
    size = part.parallel.tensor_parallel
    first = part.place.pp_index * size
    try:
        mindspore.communication.init("hccl")
        if part.is_split:
            mindspore.communication.create_group(STAGE_GROUP, list(range(first, first + size)))
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise AgentStartError(
            f"HCCL cannot connect the {part.parallel.group_size} agents of this group: {reason}. "
            "`python tools/doctor.py explain` explains HCCL's error codes. To serve without a group, set "
            "parallel_config.tensor_parallel and pipeline_parallel to 1"
        ) from error
