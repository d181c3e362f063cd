"""Checks of settings about agents on other machines."""

from __future__ import annotations

import ipaddress

from llm_serving.config.config import Config
from llm_serving.config.parallel_section import NODES, ParallelConfig
from llm_serving.config.source import RawConfig


def check_cluster(raw: RawConfig, config: Config) -> None:
    """Checks that the settings of a cluster are complete. Refuses settings that need all agents on this machine."""
    parallel = config.parallel_config
    if parallel.idle_s is not None and parallel.executor != NODES:
        problem = f"is for executor: nodes; executor: {parallel.executor} keeps its agents; remove it"
        raise raw.error("parallel_config.idle_s", parallel.idle_s, problem)
    if parallel.nodes_per_replica > 1 and (obstacle := _obstacle_to_spanning(parallel)) is not None:
        raise raw.error("parallel_config.nodes_per_replica", parallel.nodes_per_replica, obstacle)
    if not parallel.is_remote:
        if parallel.nodes:
            problem = "has no effect with executor: local; set parallel_config.executor: nodes"
            raise raw.error("parallel_config.nodes", list(parallel.nodes), problem)
        return
    if parallel.cluster_key_file is None:
        problem = "is missing; llm-serving cluster key FILE makes the file, and every node needs it, too"
        raise raw.error("parallel_config.cluster_key_file", None, problem)
    if parallel.nodes and parallel.executor != NODES:
        raise raw.error("parallel_config.nodes", list(parallel.nodes), "is for executor: nodes; Ray has its own nodes")


def note_missing_nodes(file: str, parallel: ParallelConfig) -> list[str]:
    """Returns a note if ``nodes`` names too few nodes for one replica. The operator may add nodes later."""
    nodes, needed = parallel.nodes or (), parallel.nodes_per_replica
    if not nodes or len(nodes) >= needed or any(node.startswith("dns:") for node in nodes):
        return []
    return [
        f"{file}: parallel_config.nodes has {len(nodes)} of the {needed} nodes that a replica needs "
        f"(parallel_config.nodes_per_replica); no replica starts before llm-serving cluster add adds the others"
    ]


def _obstacle_to_spanning(parallel: ParallelConfig) -> str | None:
    """Returns the reason why the agents of a replica cannot be on several nodes, or None if they can."""
    product = f"tensor_parallel x pipeline_parallel = {parallel.group_size}"
    if parallel.executor != NODES:
        return f"is for executor: nodes; with executor: {parallel.executor}, a replica has one machine; use 1"
    if parallel.group_size % parallel.nodes_per_replica:
        return f"does not divide the agents of a replica ({product}) equally; use a divisor of {parallel.group_size}"
    return unreachable_node(parallel)


def unreachable_node(parallel: ParallelConfig) -> str | None:
    """Returns a problem if some of ``nodes`` have loopback addresses, and others do not. Otherwise, returns None."""
    here = [node for node in parallel.nodes or () if _is_loopback(node)]
    if here and len(here) < len(parallel.nodes or ()):
        return (
            f"needs nodes that reach each other, and {here[0]} is an address of this machine only; write the address "
            "that the other nodes reach"
        )
    return None


def _is_loopback(node: str) -> bool:
    return is_loopback_host(node.rpartition(":")[0].strip("[]"))


def is_loopback_host(host: str) -> bool:
    """Returns True if only this machine reaches ``host``, a name or an IP address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
