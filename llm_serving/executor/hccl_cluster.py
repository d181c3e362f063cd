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

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from llm_serving.config import Config
from llm_serving.errors import AgentStartError
from llm_serving.executor.agent_process import ModuleProcess

SCHEDULER_MODULE = "agent.group.cluster_scheduler"
_CHOOSES_ADDRESS = {"HCCL_IF_IP", "HCCL_SOCKET_IFNAME"}
"""Environment variables with which an operator chooses the network of HCCL. If one is set, this module sets neither."""


@dataclass(frozen=True, slots=True)
class GroupPart:
    """The part of a group that is on this machine, if the group spans several machines."""

    members: range
    """Numbers of this machine's agents in the group."""
    own_host: str
    """The IP address of this machine that the other machines reach."""
    scheduler: tuple[str, int] | None = None
    """IP address and port at which the agents find each other. None on a CPU, where they need not."""
    runs_scheduler: bool = False
    """True if the scheduler of the cluster runs on this machine."""


@dataclass(frozen=True, slots=True)
class ClusterPlace:
    """The address of a group's cluster, and the environment variables with which agents find it."""

    host: str
    """IP address of the scheduler, on which it listens."""
    port: int
    num_agents: int
    timeout_s: float
    """Maximum time until all agents have found each other."""
    own_host: str = ""
    """The IP address with which agents of this machine connect. Empty if all agents are on one machine."""

    @classmethod
    def on_this_machine(cls, host: str, num_agents: int, timeout_s: float) -> ClusterPlace:
        """Returns a place with a port that is free now. ``host`` is a loopback address."""
        host = "127.0.0.1" if host == "localhost" else host  # MindSpore accepts IP addresses, but no host names
        return cls(host, free_port(host), num_agents, timeout_s)

    @classmethod
    def of(cls, config: Config, part: GroupPart | None = None) -> ClusterPlace | None:
        """Returns the place of the cluster of a group. Returns None if the config does not need HCCL.

        ``part`` is None if all agents of the group are on this machine.
        """
        num_agents, settings = config.parallel_config.group_size, config.serving_config
        if config.device != "Ascend" or num_agents == 1:
            return None
        if part is None:
            return cls.on_this_machine(settings.agent_ip, num_agents, settings.agent_start_timeout_s)
        if part.scheduler is None:
            raise AgentStartError("a group on several machines has no address at which its agents find each other")
        return cls(*part.scheduler, num_agents, settings.agent_start_timeout_s, part.own_host)

    @property
    def common(self) -> dict[str, str]:
        """The variables that scheduler and agents have alike."""
        return {
            "MS_WORKER_NUM": str(self.num_agents),
            "MS_SCHED_HOST": self.host,
            "MS_SCHED_PORT": str(self.port),
            "MS_TOPO_TIMEOUT": str(max(1, int(self.timeout_s))),
        }

    def environment(self, member: int) -> dict[str, str]:
        """Returns the variables of one agent. ``member`` is its number in the group and its rank in HCCL's world."""
        variables = {**self.common, "MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(member)}
        if self.own_host:
            variables["MS_WORKER_IP"] = self.own_host
            if not _CHOOSES_ADDRESS & os.environ.keys():
                variables["HCCL_IF_IP"] = self.own_host
        return variables


class HcclCluster(ModuleProcess):
    """The cluster's scheduler process of one group. It listens at ``place``, without authentication or encryption."""

    def __init__(self, place: ClusterPlace, log_path: Path) -> None:
        environment = {**place.common, "MS_ROLE": "MS_SCHED"}
        super().__init__("the cluster scheduler", SCHEDULER_MODULE, "--pipe-fd", log_path, environment)


def free_port(host: str) -> int:
    """Returns a port that is free now. The cluster's scheduler process binds it shortly afterwards."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
