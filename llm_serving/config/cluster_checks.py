"""Checks of settings about agents on other machines."""

from __future__ import annotations

from llm_serving.config.config import Config
from llm_serving.config.parallel_section import NODES
from llm_serving.config.source import RawConfig


def check_cluster(raw: RawConfig, config: Config) -> None:
    """Checks that the settings of a cluster are complete. Refuses settings that need all agents on this machine."""
    parallel = config.parallel_config
    if parallel.idle_s is not None and parallel.executor != NODES:
        problem = f"is for executor: nodes; executor: {parallel.executor} keeps its agents; remove it"
        raise raw.error("parallel_config.idle_s", parallel.idle_s, problem)
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
    tiers = config.kv_tier_config
    for name, folder in (("ssd_folder", tiers.ssd_folder), ("shared_folder", tiers.shared_folder)):
        if folder is not None:
            problem = (
                f"with executor: {parallel.executor}: the server writes this folder, and the blocks are in the memory "
                "of other machines; remove it, and keep host_blocks"
            )
            raise raw.error(f"kv_tier_config.{name}", folder, problem)
