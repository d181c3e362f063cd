"""Checks of the settings for Mooncake, which can carry KV blocks between nodes."""

from __future__ import annotations

from llm_serving.config.cluster_checks import unreachable_node
from llm_serving.config.config import Config
from llm_serving.config.parallel_section import ASCEND, MOONCAKE, TCP, ParallelConfig
from llm_serving.config.source import RawConfig


def check_mooncake(raw: RawConfig, config: Config) -> None:
    """Checks that nodes hand over blocks, and that the operator has accepted Mooncake's missing protection."""
    parallel, default = config.parallel_config, ParallelConfig()
    if parallel.hand_over_transport != MOONCAKE:
        for name in ("mooncake_protocol", "mooncake_device", "mooncake_unprotected"):
            if (value := getattr(parallel, name)) != getattr(default, name):
                problem = "has no effect without hand_over_transport: mooncake; set it, or remove this key"
                raise raw.error(f"parallel_config.{name}", value, problem)
        return
    if not (parallel.has_roles and parallel.is_remote):
        problem = (
            "is for roles of replicas on nodes; other replicas send no blocks to other machines. Set "
            f"parallel_config.roles and parallel_config.executor, or use {TCP}"
        )
        raise raw.error("parallel_config.hand_over_transport", MOONCAKE, problem)
    if not parallel.mooncake_unprotected:
        problem = (
            "everyone who reaches the ports of Mooncake on a node can read and change handed blocks, which contain "
            "prompts. Let only trusted machines reach the nodes, and set mooncake_unprotected: true"
        )
        raise raw.error("parallel_config.mooncake_unprotected", False, problem)
    if (problem_of_nodes := unreachable_node(parallel)) is not None:
        raise raw.error("parallel_config.hand_over_transport", MOONCAKE, problem_of_nodes)
    device, key = parallel.mooncake_device, "parallel_config.mooncake_device"
    if device is not None and parallel.mooncake_protocol == TCP:
        raise raw.error(key, device, "has no effect with mooncake_protocol: tcp; remove it")
    if device is not None and parallel.mooncake_protocol == ASCEND and not (device.isascii() and device.isdecimal()):
        raise raw.error(key, device, "must be the number of an Ascend, for example 0")
