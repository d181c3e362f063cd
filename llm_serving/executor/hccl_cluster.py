"""MindSpore's dynamic cluster, with which HCCL connects the agents of a group on Ascend devices.

Each agent is a worker of the cluster. It reads environment variables and joins in ``mindspore.communication.init()``.
One more process, the cluster's scheduler, lets the workers find each other. ``msrun`` starts the same processes for
training jobs. Source: "Dynamic Cluster Startup",
https://www.mindspore.cn/tutorials/en/r2.8.0/parallel/dynamic_cluster.html. The alternative, rank tables, is deprecated
since MindSpore 2.4 (docs/ascend.md).

Every group has its own cluster, so that one group can be restarted while the others serve. On a CPU, agents exchange
data in shared memory instead (``llm_serving/ipc/exchange.py``).
"""

from __future__ import annotations

import socket
from pathlib import Path

from llm_serving.config import Config
from llm_serving.executor.agent_process import ModuleProcess

SCHEDULER_MODULE = "agent.group.cluster_scheduler"


class HcclCluster(ModuleProcess):
    """The cluster's scheduler process of one group, and the environment variables with which the agents find it."""

    def __init__(self, host: str, num_agents: int, timeout_s: float, log_path: Path) -> None:
        """``host`` is a loopback address, because all agents of a group are on one machine.

        ``timeout_s``: maximum time until all workers have found each other.
        """
        host = "127.0.0.1" if host == "localhost" else host  # MindSpore accepts IP addresses, but no host names
        self._common = {
            "MS_WORKER_NUM": str(num_agents),
            "MS_SCHED_HOST": host,
            "MS_SCHED_PORT": str(_free_port(host)),
            "MS_TOPO_TIMEOUT": str(max(1, int(timeout_s))),
        }
        environment = {**self._common, "MS_ROLE": "MS_SCHED"}
        super().__init__("the cluster scheduler", SCHEDULER_MODULE, "--pipe-fd", log_path, environment)

    @classmethod
    def of(cls, config: Config, log_path: Path) -> HcclCluster | None:
        """Starts the cluster of a group. Returns None if the config does not need HCCL."""
        num_agents = config.parallel_config.group_size
        if config.device != "Ascend" or num_agents == 1:
            return None
        settings = config.serving_config
        return cls(settings.agent_ip, num_agents, settings.agent_start_timeout_s, log_path)

    def environment(self, member: int) -> dict[str, str]:
        """Returns the variables of one agent. ``member`` is its number in the group and its rank in HCCL's world."""
        return {**self._common, "MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(member)}


def _free_port(host: str) -> int:
    """Returns a port that is free now. The cluster's scheduler process binds it shortly afterwards."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
