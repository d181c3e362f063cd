"""What HCCL needs to connect the agents of a group on Ascends: MindSpore's dynamic cluster.

Each agent is a worker of the cluster and joins it in ``mindspore.communication.init()``, by environment variables; one
more process, the cluster's scheduler, lets them find each other. ``msrun`` does the same for training jobs. Source:
"Dynamic Cluster Startup", https://www.mindspore.cn/tutorials/en/r2.8.0/parallel/dynamic_cluster.html; rank tables,
the other way, are deprecated since MindSpore 2.4 (docs/ascend.md).

Every group is a cluster of its own, so that one may be started again while the others serve. On a CPU agents meet in
shared memory (``llm_serving/ipc/exchange.py``) and none of this is used.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from llm_serving.config import Config
from llm_serving.errors import AgentStartError

SCHEDULER_MODULE = "agent.group.cluster_scheduler"


class HcclCluster:
    """One run of a group's cluster scheduler, and the environment that takes an agent to it."""

    def __init__(self, host: str, num_agents: int, timeout_s: float, log_path: Path) -> None:
        """``host``: a loopback address; all agents of a group are on one machine. ``timeout_s``: to find each other."""
        host = "127.0.0.1" if host == "localhost" else host  # MindSpore takes addresses only
        self._common = {
            "MS_WORKER_NUM": str(num_agents),
            "MS_SCHED_HOST": host,
            "MS_SCHED_PORT": str(_free_port(host)),
            "MS_TOPO_TIMEOUT": str(max(1, int(timeout_s))),
        }
        log_path.parent.mkdir(parents=True, exist_ok=True)
        read_end, self._pipe = os.pipe()
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        try:
            with log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", SCHEDULER_MODULE, "--pipe-fd", str(read_end)],
                    pass_fds=(read_end,),
                    stdin=subprocess.DEVNULL,
                    stdout=log.fileno(),
                    stderr=log.fileno(),
                    env={**os.environ, "PYTHONPATH": path, **self._common, "MS_ROLE": "MS_SCHED"},
                    start_new_session=True,
                )
        except OSError as error:
            os.close(self._pipe)
            raise AgentStartError(f"the cluster scheduler could not be started: {error}") from error
        finally:
            os.close(read_end)

    @classmethod
    def of(cls, config: Config, log_path: Path) -> HcclCluster | None:
        """For a group of the config; None where HCCL is not used."""
        num_agents = config.parallel_config.group_size
        if config.device != "Ascend" or num_agents == 1:
            return None
        settings = config.serving_config
        return cls(settings.agent_ip, num_agents, settings.agent_start_timeout_s, log_path)

    @property
    def pid(self) -> int:
        return self._process.pid

    def environment(self, member: int) -> dict[str, str]:
        """Of an agent; ``member`` is its place in the group, from 0, and its rank in HCCL's world."""
        return {**self._common, "MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(member)}

    def kill(self) -> None:
        """End it, without waiting."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        self._process.kill()

    def close(self) -> None:
        """End it, and wait until it has."""
        self.kill()
        self._process.wait()


def _free_port(host: str) -> int:
    """A port nobody listens on. The scheduler binds it itself, a moment later."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
