"""Nodes for tests: processes of ``agent_host``, and a proxy that cuts or holds the link to a node."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
from pathlib import Path

import psutil

from llm_serving.cluster.key import make_key
from support.forks import ForkedProcess, fork_server, forked_agents
from support.processes import has_ended
from support.server_process import shm_entries
from support.small_configs import REPOSITORY
from support.time_limits import time_limit


def new_key(folder: Path, name: str = "cluster.key") -> Path:
    path = folder / name
    make_key(path)
    return path


class NodeProcess:
    """A node on the loopback address. ``stop`` checks that no process or shared memory is left.

    The node and its agents are forked from processes that have imported their modules (``support.forks``).
    """

    def __init__(
        self, folder: Path, key: Path, *options: str, listen: str = "127.0.0.1:0", modules: Path | None = None
    ) -> None:
        """Starts the node. It finds Python modules also in the folder ``modules``."""
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._stderr = (folder / "stderr.txt").open("ab")
        agents = "support.node_preload" if "--agent-module" in options else "support.agent_preload"
        arguments = ["--key-file", str(key), "--listen", listen, "--log-folder", str(folder), "--with-stdin", *options]
        paths = [*([] if modules is None else [modules]), REPOSITORY, REPOSITORY / "tests"]
        read_end, standard_input = os.pipe()
        output, write_end = os.pipe()
        self._stdin, self._stdout = os.fdopen(standard_input, "wb"), os.fdopen(output, "rb")
        try:
            self._process = ForkedProcess(
                fork_server("support.node_preload"),
                "support.forked_node",
                [fork_server(agents), *arguments],
                {0: read_end, 1: write_end, 2: self._stderr.fileno()},
                {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            )
        finally:
            os.close(read_end)
            os.close(write_end)
        line = self._stdout.readline().decode()
        assert line.startswith("ready "), self.stderr()
        self.address = line.split()[1]
        self._family: set[psutil.Process] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def stderr(self) -> str:
        return (self.folder / "stderr.txt").read_text(errors="replace")

    def agents(self) -> list[psutil.Process]:
        """Returns the agents that run now, and remembers them for ``stop``."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._family.update(psutil.Process(self.pid).children(recursive=True), forked_agents(self.pid))
        return [process for process in self._family if not has_ended(process)]

    def send_signal(self, number: int) -> None:
        self.agents()
        self._process.send_signal(number)

    def stop(self) -> None:
        """Ends the node, also after it was killed or stopped by a signal."""
        self.agents()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=time_limit(20.0))
        self._stdin.close()
        self._stdout.close()
        self._stderr.close()
        _, alive = psutil.wait_procs(list(self._family), timeout=time_limit(5.0))
        for process in alive:
            process.kill()
        assert alive == [], f"agents outlived their node: {alive}"
        assert shm_entries(self.pid) == set(), "shared memory was left behind"


class LinkProxy:
    """A TCP proxy in front of a port of this machine. It can close all connections, or hold all bytes."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._peers: dict[socket.socket, socket.socket] = {}
        self._holds = threading.Event()
        self._cuts = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def hold(self, *, held: bool) -> None:
        """Forwards no bytes while ``held`` is true, as a network that drops all packets."""
        (self._holds.set if held else self._holds.clear)()

    def cut(self) -> None:
        """Closes all connections. Connections that are opened later work."""
        self._cuts.set()

    def close(self) -> None:
        self._is_closed = True
        self._thread.join(time_limit(5.0))

    def _run(self) -> None:
        with self._listener, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_closed:
                events = selector.select(0.02)
                if self._cuts.is_set():
                    self._cuts.clear()
                    for each in list(self._peers):
                        self._drop(each, selector)
                    continue
                if self._holds.is_set():
                    self._holds.wait(0.02)
                    continue
                for key, _ in events:
                    self._pass_on(key.fileobj, selector)  # type: ignore[arg-type]
            for each in list(self._peers):
                self._drop(each, selector)

    def _pass_on(self, source: socket.socket, selector: selectors.BaseSelector) -> None:
        if source is self._listener:
            client = self._listener.accept()[0]
            with contextlib.suppress(OSError):
                node = socket.create_connection(("127.0.0.1", self._target))
                for one, other in ((client, node), (node, client)):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._peers[one] = other
                    selector.register(one, selectors.EVENT_READ)
                return
            client.close()
        elif source in self._peers:
            data = b""
            with contextlib.suppress(OSError):
                data = source.recv(1 << 16)
                self._peers[source].sendall(data)
            if not data:
                self._drop(source, selector)

    def _drop(self, one: socket.socket, selector: selectors.BaseSelector) -> None:
        for each in (one, self._peers.get(one)):
            if each is not None and self._peers.pop(each, None) is not None:
                selector.unregister(each)
                each.close()
