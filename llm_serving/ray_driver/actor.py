"""The Ray actor on a machine of the cluster. It starts a process ``agent_host`` and reports when this process ends."""

from __future__ import annotations

import contextlib
import subprocess
import sys

START_TIMEOUT_S = 60.0
"""Maximum seconds to wait for the exit code of a node that did not start."""


class HostActor:
    """Runs one node. Ray must give the actor several threads.

    ``wait`` blocks one thread until the node ends, and ``stop`` runs in another one.
    """

    def __init__(self, key_file: str, log_folder: str, adapter_folder: str, agent_module: str) -> None:
        folders = ["--log-folder", log_folder, "--adapter-folder", adapter_folder]
        self._options = ["--key-file", key_file, *folders, "--agent-module", agent_module]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Starts the node and returns its address. Raises RuntimeError if the node does not start.

        The node's standard input is a pipe of this process, so the node ends when this process ends or is killed.
        """
        import ray

        ip = ray.util.get_node_ip_address()
        listen = f"[{ip}]:0" if ":" in ip else f"{ip}:0"
        command = [sys.executable, "-P", "-m", "llm_serving.agent_host", "--with-stdin", "--listen", listen]
        self._process = subprocess.Popen(
            [*command, *self._options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode(errors="replace")
        if not line.startswith("ready "):
            code = self._process.wait(START_TIMEOUT_S)
            raise RuntimeError(f"agent_host did not start on {ip} (exit code {code}); the actor's log has the reason")
        return line.split()[1]

    def wait(self) -> str:
        """Waits until the node ends. Returns how it ended."""
        assert self._process is not None
        code = self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        """Asks the node to end its agents and itself. Waits at most 10 seconds, and then kills the node."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10.0)
            self._process.kill()
