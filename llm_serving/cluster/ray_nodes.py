"""Lets Ray place the nodes of a server. The server starts a separate process for this, the Ray driver, and never
imports Ray.
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import threading
import time
from pathlib import Path

from llm_serving.cluster.nodes import NodeError, NodePool
from llm_serving.config import Config
from llm_serving.errors import AgentStartError, ConfigError, ProtocolError
from llm_serving.executor.agent_process import ModuleProcess
from llm_serving.ipc import ray_messages
from llm_serving.ipc.channel import Channel
from llm_serving.ipc.ray_messages import NodeEnded, NodeLost, NodePlaced, Placement

DRIVER_MODULE = "llm_serving.ray_driver"
FIRST_PAUSE_S = 1.0
"""Seconds before Ray's driver is started again after its first failure."""
LONGEST_PAUSE_S = 30.0
"""Maximum seconds before Ray's driver is started again. If the driver ran longer than this, the next pause is
``FIRST_PAUSE_S`` again."""
STOP_TIMEOUT_S = 30.0
"""Maximum seconds to wait for the end of Ray's driver, its nodes and their agents."""


def check_ray() -> None:
    """Raises ConfigError unless the package ``ray`` is installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("parallel_config.executor = 'ray': the package ray is missing; pip install llm-serving[ray]")


def placement_of(config: Config, agent_module: str = "agent") -> Placement:
    """Returns the message to the Ray driver with the nodes that a config needs."""
    parallel = config.parallel_config
    resources = {"CPU": float(parallel.ray_cpus)}
    if config.device == "Ascend":
        resources["NPU"] = float(parallel.group_size)
    return Placement(
        address=parallel.ray_address,
        num_nodes=parallel.data_parallel,
        resources=resources,
        key_file=str(parallel.cluster_key_file),
        log_folder=str(Path(config.log_config.path).absolute().parent / "nodes"),
        agent_module=agent_module,
    )


class RayNodes:
    """Runs the Ray driver, and adds the nodes that the driver places to ``pool``. Restarts the driver if it ends.

    The constructor raises ConfigError if Ray is not installed. ``close`` ends the driver and with it all its nodes.
    """

    def __init__(self, placement: Placement, pool: NodePool, log_path: Path) -> None:
        check_ray()
        self._placement = placement
        self._pool = pool
        self._log_path = log_path
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._names: set[str] = set()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray driver", daemon=True)
        pool.on_loss = self._replace
        self._thread.start()

    def close(self) -> None:
        """Ends the driver, its nodes and their agents. Waits at most ``STOP_TIMEOUT_S`` seconds."""
        self._is_closed.set()
        with self._lock, contextlib.suppress(OSError):
            if self._channel is not None:
                self._channel.shut_down()
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._is_closed.is_set():
            began = time.monotonic()
            try:
                reason = self._drive()
            except (OSError, ProtocolError, AgentStartError) as error:
                reason = str(error)
            self._forget_all()
            if self._is_closed.is_set():
                return
            message = f"{reason}; its log is {self._log_path}"
            self._pool.event("ray_driver_lost", level="warning", message=message)
            pause_s = FIRST_PAUSE_S if time.monotonic() - began > LONGEST_PAUSE_S else pause_s
            self._is_closed.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _drive(self) -> str:
        """Runs the driver until it ends. Returns the reason of the end."""
        own, other = socket.socketpair()
        channel = Channel(own)
        try:
            with other:
                process = ModuleProcess(
                    *("the Ray driver", DRIVER_MODULE, "--pipe-fd", self._log_path, {}),
                    arguments=["--socket-fd", str(other.fileno())],
                    descriptors=[other.fileno()],
                )
            try:
                channel.send(ray_messages.encode(self._placement))
                with self._lock:
                    self._channel = channel
                if self._is_closed.is_set():
                    return "the server stops"
                while (payloads := channel.receive_available()) is not None:
                    for payload in payloads:
                        self._handle(ray_messages.read_at_server(payload))
                return f"the Ray driver has ended: {process.log.tail()[-500:]}"
            finally:
                with self._lock:
                    self._channel = None
                process.stop(STOP_TIMEOUT_S)
                process.close()
        finally:
            channel.close()

    def _handle(self, message: ray_messages.ToServer) -> None:
        if isinstance(message, NodePlaced):
            self._names.add(message.name)
            with contextlib.suppress(NodeError):
                self._pool.add(message.address, message.name)
        elif isinstance(message, NodeEnded):
            self._forget(message.name)
        elif message.num_nodes:
            waiting = f"{message.num_nodes} nodes wait for resources; {message.reason}"
            self._pool.event("ray_waiting", level="warning", message=waiting)

    def _forget(self, name: str) -> None:
        self._names.discard(name)
        with contextlib.suppress(NodeError):  # an operator may have removed the node
            self._pool.remove(name)

    def _forget_all(self) -> None:
        for name in list(self._names):
            self._forget(name)

    def _replace(self, name: str) -> None:
        """Asks the driver to replace the node ``name``, whose link is lost, by another node."""
        with self._lock, contextlib.suppress(OSError):
            if self._channel is not None and name in self._names:
                self._channel.send(ray_messages.encode(NodeLost(name)))
