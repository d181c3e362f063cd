"""Compares the memory plan with the free memory of the device, which only a process that owns the device can query."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from agent.backends.ascend.context import device_id
from llm_serving.config import Config
from llm_serving.errors import AgentStartError
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import MemoryPlan, advice, estimate_rank_memory
from llm_serving.planning.rank_memory import format_bytes

logger = logging.getLogger("agent.ascend")


def check_device_memory(config: Config, mindspore: Any, rank: int = 0) -> MemoryPlan:
    """Checks that the memory plan fits into the device's free memory and into ``max_device_memory``. Returns the plan.

    First initialises the device, because MindSpore otherwise reports 0 bytes. If the plan does not fit, raises
    AgentStartError with the plan's table. The error also names the largest KV cache that fits, or the part that leaves
    no memory for a KV cache. If the device still reports a total of 0 bytes, logs a warning and uses only the
    configured limit.
    """
    device = device_id(config, rank)
    _initialise_device(mindspore)
    properties = mindspore.hal.get_device_properties(device, "Ascend")
    free, limit = int(properties.free_memory), config.context.max_device_memory_bytes
    if int(properties.total_memory) == 0:
        logger.warning("Ascend device %d does not report its memory; only max_device_memory limits the plan", device)
        free = limit or 0
    source = f"free memory of Ascend device {device}"
    if limit is not None and limit <= free:
        free, source = limit, "max_device_memory"
    plan = estimate_rank_memory(config, rank, Machine(free, source))
    if free == 0:
        return replace(plan, available_bytes=None)
    if not plan.fits:
        raise AgentStartError(
            f"the memory plan needs {format_bytes(plan.total_bytes)}, of {format_bytes(free)} ({source}): "
            f"{advice(plan)}\n{plan.table()}"
        )
    return plan


def _initialise_device(mindspore: Any) -> None:
    """Runs one small operator, which makes MindSpore open the device. Raises AgentStartError if the device refuses."""
    try:
        (mindspore.Tensor([1.0]) + 1).asnumpy()
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise AgentStartError(
            f"the Ascend device cannot run an operator: {first}; see docs/ascend.md, section Problems on a device"
        ) from error
