"""The agents of a group on Ascends: HCCL's groups, which the communication primitives of the graph name.

The server has put the agents into a cluster (``llm_serving/executor/hccl_cluster.py``); ``init`` joins it. An agent's
rank in HCCL's world is its number in its group. Sources: docs/ascend.md.
"""

from __future__ import annotations

from typing import Any

from agent.backends.native.groups import STAGE_GROUP
from agent.group.model_part import ModelPart
from llm_serving.errors import AgentStartError


def join_group(part: ModelPart, mindspore: Any) -> None:
    """Join the agents of the group, and those of the stage among them. Does nothing where there is no other agent.

    Raises AgentStartError when HCCL cannot connect them.
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
            f"HCCL cannot connect the {part.parallel.group_size} agents of this group: {reason} "
            "(`python tools/doctor.py explain` knows its error codes); or set parallel_config.tensor_parallel and "
            "pipeline_parallel to 1"
        ) from error
