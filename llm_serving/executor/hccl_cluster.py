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
from llm_serving.errors import AgentError, AgentLostError, AgentStartError
from llm_serving.executor.agent_process import ModuleProcess, describe_exit

SCHEDULER_MODULE = "agent.group.cluster_scheduler"
_CHOOSES_ADDRESS = {"HCCL_IF_IP", "HCCL_SOCKET_IFNAME"}
"""The two environment variables with which an operator chooses the network of HCCL. If one of them is set, this module
sets neither of them.
"""


@dataclass(frozen=True, slots=True)
class GroupPart:
    """The part of a group that is on this machine, if the group spans several machines."""

    members: range
    """Numbers of this machine's agents in the group."""
    own_host: str
    """The IP address at which the other machines reach this machine."""
    scheduler: tuple[str, int] | None = None
    """IP address and port of the cluster's scheduler, through which the agents find each other. None on a CPU."""
    reserved: socket.socket | None = None
    """Keeps the scheduler's port until the scheduler starts. None unless the scheduler runs on this machine."""


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
        """Returns the place of a cluster on this machine, with a port that is free now. ``host`` is a loopback address.
        """
        host = "127.0.0.1" if host == "localhost" else host  # MindSpore accepts IP addresses, but no host names
        with reserve_port(host) as reserved:
            return cls(host, reserved.getsockname()[1], num_agents, timeout_s)

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
        """The environment variables that have the same values in the cluster's scheduler and in all agents."""
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
        self.exit_descriptor = -1
        """Descriptor that becomes readable when the process ends."""
        try:
            self.exit_descriptor = os.pidfd_open(self.pid)
        except OSError as error:
            self.close()
            raise AgentStartError(f"the cluster scheduler could not be started: {error}") from error

    def loss(self, *, is_ready: bool) -> AgentError:
        """Returns the error for a cluster scheduler that has ended. ``is_ready``: all agents of this machine were
        ready.
        """
        text = f"the cluster scheduler ended ({describe_exit(self._process.wait())}); its log is {self.log.path}"
        return AgentLostError(text) if is_ready else AgentStartError(f"{text}, and ends with:\n{self.log.tail()}")

    def close(self) -> None:
        super().close()
        if self.exit_descriptor >= 0:
            os.close(self.exit_descriptor)
            self.exit_descriptor = -1


def reserve_port(host: str) -> socket.socket:
    """Returns a socket that keeps a free port, so that no other program gets the port.

    The caller closes the socket before the cluster's scheduler process binds the port. Raises OSError.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        reserved.bind((host, 0))
    except OSError:
        reserved.close()
        raise
    return reserved
