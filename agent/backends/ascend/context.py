"""MindSpore's settings for an Ascend, from a config. What each is and where it comes from: docs/ascend.md.

Everything that only an Ascend's MindSpore can carry out goes through one object, ``mindspore`` itself unless a test
hands over a recorder.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

from llm_serving.config import Config
from llm_serving.errors import AgentStartError

GIB = 1024**3
_JIT_LEVELS = {"kbk": "O0", "ge": "O2"}
"""Kernel by kernel, which dynamic shapes want; the whole graph through GE."""
_FUSION_JIT_LEVEL = "O1"
"""Kernel by kernel, with operators fused (graph kernel)."""


def environment(config: Config) -> dict[str, str]:
    """Variables MindSpore reads when it is imported; those that are set already stay as they are."""
    variables = {
        "GLOG_v": "3",  # errors only
        "RUN_MODE": "predict",  # MindFormers' models read it
        "MS_ALLOC_CONF": "enable_vmm:True",  # the device's memory without fragments between pools
    }
    if config.model_config.weight_layout == "nz":
        variables["MS_INTERNAL_ENABLE_NZ_OPS"] = "QuantBatchMatmul"
    if config.captured_batch_sizes:
        variables["MS_DEV_RUNTIME_CONF"] = f"graph_capture_max_number:{len(config.captured_batch_sizes)}"
    if config.context.enable_graph_kernel and config.context.graph_kernel_flags:
        variables["MS_DEV_GRAPH_KERNEL_FLAGS"] = config.context.graph_kernel_flags
    return variables


def jit_config(config: Config) -> dict[str, str]:
    """``jit_level`` and, where MindSpore allows it, ``infer_boost``: without that the kernels of inference
    (PagedAttention, ReshapeAndCache and their like) are not looked for."""
    level = _JIT_LEVELS[config.model_config.backend]
    if config.model_config.backend == "kbk" and config.context.enable_graph_kernel:
        level = _FUSION_JIT_LEVEL
    return {"jit_level": level, "infer_boost": "on" if level == "O0" else "off"}


def device_id(config: Config, rank: int = 0) -> int:
    """Of an agent: ``start_device_id``, or the MindFormers YAML's ``device_id`` where that is 0, and its rank."""
    return (config.serving_config.start_device_id or config.context.device_id) + rank


def prepare_environment(config: Config, variables: MutableMapping[str, str] = os.environ) -> None:
    """Before the first import of MindSpore."""
    for name, value in environment(config).items():
        variables.setdefault(name, value)


def set_up_device(config: Config, mindspore: Any, rank: int = 0) -> None:
    """Choose the device and set everything before the first graph.

    Raises AgentStartError when there is no such device, or MindSpore cannot use it.
    """
    device, reason = device_id(config, rank), ""
    try:
        mindspore.set_device("Ascend", device)
        available = mindspore.device_context.ascend.device_count()
    except (RuntimeError, ValueError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        available = 0
    if reason:
        raise AgentStartError(
            f"MindSpore cannot use Ascend device {device}: {reason}. Driver, CANN and MindSpore must be of versions "
            "that belong together and CANN's set_env.sh sourced (docs/ascend.md); or set device_target: CPU"
        )
    if device >= available:
        raise AgentStartError(
            f"serving_config.start_device_id makes this agent's device number {device}; there are {available} "
            "(ASCEND_RT_VISIBLE_DEVICES may hide some)"
        )
    mindspore.set_context(mode=mindspore.GRAPH_MODE, jit_config=jit_config(config))
    mindspore.set_recursion_limit(config.context.max_call_depth)
    if config.captured_batch_sizes:
        mindspore.runtime.set_kernel_launch_capture(True)
    limit = config.context.max_device_memory_bytes
    if limit is not None:
        mindspore.runtime.set_memory(max_size=f"{limit / GIB:g}GB")
