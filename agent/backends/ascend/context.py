"""Derives MindSpore's settings for an Ascend from a config. docs/ascend.md explains each setting and its source.

Calls that only MindSpore on an Ascend supports go through the argument ``mindspore``, so that a test can record them.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

from llm_serving.config import Config
from llm_serving.errors import AgentStartError

GIB = 1024**3
_JIT_LEVELS = {"kbk": "O0", "ge": "O2"}
"""O0 launches kernel by kernel, which dynamic shapes need. O2 runs the whole graph through GE."""
_FUSION_JIT_LEVEL = "O1"
"""O1 launches kernel by kernel, with fused operators (graph kernel)."""


def environment(config: Config) -> dict[str, str]:
    """Returns the environment variables that MindSpore reads when it is imported."""
    variables = {
        "GLOG_v": "3",  # log only errors
        "RUN_MODE": "predict",  # read by MindFormers' models
        "MS_ALLOC_CONF": "enable_vmm:True",  # prevents fragmentation of device memory between pools
    }
    if config.model_config.weight_layout == "nz":
        variables["MS_INTERNAL_ENABLE_NZ_OPS"] = "QuantBatchMatmul"
    if config.captured_batch_sizes:
        variables["MS_DEV_RUNTIME_CONF"] = f"graph_capture_max_number:{len(config.captured_batch_sizes)}"
    if config.context.enable_graph_kernel and config.context.graph_kernel_flags:
        variables["MS_DEV_GRAPH_KERNEL_FLAGS"] = config.context.graph_kernel_flags
    return variables


def jit_config(config: Config) -> dict[str, str]:
    """Returns ``jit_level`` and ``infer_boost``.

    MindSpore finds the inference kernels (PagedAttention, ReshapeAndCache and others) only with ``infer_boost``, which
    it allows at level O0 only.
    """
    level = _JIT_LEVELS[config.model_config.backend]
    if config.model_config.backend == "kbk" and config.context.enable_graph_kernel:
        level = _FUSION_JIT_LEVEL
    return {"jit_level": level, "infer_boost": "on" if level == "O0" else "off"}


def device_id(config: Config, rank: int = 0) -> int:
    """Returns an agent's device: its rank plus ``start_device_id``, or plus ``context.device_id`` if that is 0."""
    return (config.serving_config.start_device_id or config.context.device_id) + rank


def prepare_environment(config: Config, variables: MutableMapping[str, str] = os.environ) -> None:
    """Sets the variables that are not set yet. Must run before MindSpore is imported."""
    for name, value in environment(config).items():
        variables.setdefault(name, value)


def set_up_device(config: Config, mindspore: Any, rank: int = 0) -> None:
    """Selects the device and makes all settings that must come before the first graph.

    Raises AgentStartError if the device does not exist or MindSpore cannot use it.
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
            f"MindSpore cannot use Ascend device {device}: {reason}. Install matching versions of driver, CANN and "
            "MindSpore, and source CANN's set_env.sh (docs/ascend.md); or set device_target: CPU"
        )
    if device >= available:
        raise AgentStartError(
            f"serving_config.start_device_id gives this agent device {device}, but there are {available} devices "
            "(ASCEND_RT_VISIBLE_DEVICES may hide some)"
        )
    mindspore.set_context(mode=mindspore.GRAPH_MODE, jit_config=jit_config(config))
    mindspore.set_recursion_limit(config.context.max_call_depth)
    if config.captured_batch_sizes:
        mindspore.runtime.set_kernel_launch_capture(True)
    limit = config.context.max_device_memory_bytes
    if limit is not None:
        mindspore.runtime.set_memory(max_size=f"{limit / GIB:g}GB")
