"""Derives MindSpore's settings for an Ascend from a config. docs/ascend.md explains each setting and its source.

Calls that only MindSpore on an Ascend supports go through the argument ``mindspore``, so that a test can record them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from typing import Any

from agent.backends.ascend.fusion import fusion_flags
from llm_serving.config import Config
from llm_serving.errors import AgentStartError

GIB = 1024**3
_JIT_LEVELS = {"kbk": "O0", "ge": "O2"}
"""MindSpore's ``jit_level`` for each value of the setting ``backend``. Level O0 launches one kernel after another,
which the dynamic shapes of ``kbk`` require. Level O2 runs the whole graph through GE, the graph engine of CANN.
"""
_DISABLED_CUSTOM_KERNELS = "MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST"
_NZ_PRIMITIVES = "MS_INTERNAL_ENABLE_NZ_OPS"
_EXPANSION_MODE = "HCCL_OP_EXPANSION_MODE"
"""Environment variable of HCCL. With the value AIV, the device's vector cores run a collective without the host. HCCL
allows AIV for one communicator only. With pipeline parallelism there are two communicators: one for the stage, and one
for all agents. Then this variable is not set.
"""
_NOT_CAPTURED = ["AllGather"]
"""Collectives that MindSpore launches outside of captured graphs, between two captured parts. vllm-mindspore captures
AllReduce, but not AllGather."""
_LISTS = (_DISABLED_CUSTOM_KERNELS, _NZ_PRIMITIVES)
"""Environment variables that contain a list of names, separated by commas."""


def environment(config: Config) -> dict[str, str]:
    """Returns the environment variables that MindSpore reads when it is imported.

    ``MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST`` disables an Ascend's custom attention kernels. The custom PagedAttention
    kernel for decode steps expects a query with three axes. The query of this project's op table has only two axes:
    tokens and width (``tools/ascend_graph/kernels.py``).
    """
    variables = {
        "GLOG_v": "3",  # log only errors
        "RUN_MODE": "predict",  # read by MindFormers' models
        "MS_ALLOC_CONF": "enable_vmm:True",  # prevents fragmentation of device memory between pools
        _DISABLED_CUSTOM_KERNELS: "FlashAttentionScore,PagedAttention",
    }
    if config.parallel_config.tensor_parallel > 1 and config.parallel_config.pipeline_parallel == 1:
        variables[_EXPANSION_MODE] = "AIV"
    in_nz = _primitives_in_nz(config)
    if in_nz:
        variables[_NZ_PRIMITIVES] = ",".join(in_nz)
    if config.captured_batch_sizes:
        variables["MS_DEV_RUNTIME_CONF"] = f"graph_capture_max_number:{len(config.captured_batch_sizes)}"
    if config.context.enable_graph_kernel and config.model_config.backend == "kbk":
        variables["MS_DEV_GRAPH_KERNEL_FLAGS"] = fusion_flags(config.context.graph_kernel_flags)
    return variables


def _primitives_in_nz(config: Config) -> list[str]:
    """Returns the primitives whose int8 weights MindSpore converts to NZ, the layout of the device's matrix unit.

    ``QuantBatchMatmul`` is in the list if ``model_config.weight_layout`` is ``nz``. ``GroupedMatmulV4`` is in the list
    if it multiplies int8 activations by int8 weights of experts. For this product, every known inference project uses
    NZ weights.
    """
    names = ["QuantBatchMatmul"] if config.model_config.weight_layout == "nz" else []
    has_experts = config.shape.experts is not None
    return [*names, "GroupedMatmulV4"] if has_experts and config.quantises_activations else names


def jit_config(config: Config) -> dict[str, str]:
    """Returns MindSpore's settings ``jit_level`` and ``infer_boost`` for the configured backend.

    MindSpore finds the inference kernels (such as PagedAttention and ReshapeAndCache) only with ``infer_boost``, and
    allows ``infer_boost`` only at level O0. MindSpore's own level for graph-kernel fusion is O1, which excludes
    ``infer_boost``. Therefore ``context.enable_graph_kernel`` turns fusion on by an environment variable
    (``agent.backends.ascend.fusion``).
    """
    level = _JIT_LEVELS[config.model_config.backend]
    return {"jit_level": level, "infer_boost": "on" if level == "O0" else "off"}


def device_id(config: Config, rank: int = 0) -> int:
    """Returns the number of an agent's device: the number of the first device plus the agent's number on its machine.

    The first device is ``serving_config.start_device_id``, or ``context.device_id`` if ``start_device_id`` is 0.
    """
    first = config.serving_config.start_device_id or config.context.device_id
    return first + config.parallel_config.place_on_machine(rank)


def prepare_environment(config: Config, variables: MutableMapping[str, str] = os.environ) -> None:
    """Sets the environment variables for MindSpore. Must run before MindSpore is imported.

    A variable that the user has set keeps its value. If its value is a list of names, the missing names are added.
    Raises AgentStartError if MindSpore is already imported and a variable would change.
    """
    changed = {}
    for name, value in environment(config).items():
        given = variables.get(name)
        if given is None:
            changed[name] = value
        elif name in _LISTS and not set(value.split(",")) <= set(given.split(",")):
            changed[name] = ",".join(dict.fromkeys([*filter(None, given.split(",")), *value.split(",")]))
    if changed and variables is os.environ and "mindspore" in sys.modules:
        raise AgentStartError(f"mindspore was imported before these variables could be set: {', '.join(changed)}")
    variables.update(changed)


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
        skipped = _NOT_CAPTURED if config.parallel_config.tensor_parallel > 1 else []
        mindspore.runtime.set_kernel_launch_capture(True, skipped)
    limit = config.context.max_device_memory_bytes
    if limit is not None:
        mindspore.runtime.set_memory(max_size=f"{limit / GIB:g}GB")
