"""Clusters for chaos runs: nodes that the run starts itself, or nodes that Ray places. Both can be disturbed."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import psutil

from support.cluster import LinkProxy, NodeProcess, new_key
from support.forks import forked_agents
from support.ray_cluster import RayNode
from support.server_process import ServerProcess

Restore = Callable[[], None]
"""A function that ends a fault. It is called after the server has noticed the fault."""


class Rig(Protocol):
    """A cluster whose nodes can be lost. ``kinds`` are the names of its faults."""

    kinds: tuple[str, ...]
    settings: list[str]

    def inject(self, kind: str, node: dict[str, Any]) -> Restore: ...
    def stop(self) -> None: ...


def signal_agents(node: dict[str, Any], number: int) -> Restore:
    """Sends a signal to the agents of a node, which is an entry of ``/v1/cluster``."""
    agents = [each for each in psutil.Process(node["pid"]).children(recursive=True) if "agent" in each.cmdline()]
    agents += forked_agents(node["pid"])
    assert agents, node
    for agent in agents:
        agent.send_signal(number)
    return lambda: None


def is_mooncake(process: psutil.Process) -> bool:
    """Returns True for a process with Mooncake's engine."""
    with contextlib.suppress(psutil.ZombieProcess):
        return any("mooncake" in part for part in process.cmdline())
    return False


class OwnNodes:
    """Nodes that are processes of this run, each behind a proxy. A killed node starts again at its address."""

    kinds = (
        *("agent killed", "agent stopped", "node killed", "node stopped", "link cut", "link silent"),
        *("drained", "removed"),
    )

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self._folder, self._key = folder, new_key(folder)
        self._nodes = [NodeProcess(folder / f"node{number}", self._key) for number in range(num_nodes)]
        self._proxies = {proxy.address: proxy for proxy in (LinkProxy(node.port) for node in self._nodes)}
        self._places = {address: number for number, address in enumerate(self._proxies)}
        self.server: ServerProcess | None = None
        self.settings = [
            "parallel_config.executor=nodes",
            f"parallel_config.cluster_key_file={self._key}",
            f"parallel_config.nodes={json.dumps(list(self._proxies))}",
        ]

    def inject(self, kind: str, node: dict[str, Any]) -> Restore:
        address = node["address"]
        number, proxy = self._places[address], self._proxies[address]
        process = self._nodes[number]
        process.agents()
        if kind.startswith("agent"):
            return signal_agents(node, signal.SIGKILL if kind == "agent killed" else signal.SIGSTOP)
        if kind == "mooncake killed":
            engines = [each for each in psutil.Process(process.pid).children() if is_mooncake(each)]
            assert engines, node
            for each in engines:
                each.kill()
            return lambda: None
        if kind == "node killed":
            process.send_signal(signal.SIGKILL)
            return lambda: self._start_again(number)
        if kind == "node stopped":
            process.send_signal(signal.SIGSTOP)
            return lambda: process.send_signal(signal.SIGCONT)
        if kind == "link cut":
            proxy.cut()
            return lambda: None
        if kind == "link silent":
            proxy.hold(held=True)
            return lambda: proxy.hold(held=False)
        assert self.server is not None
        command = "/v1/cluster/drain" if kind == "drained" else "/v1/cluster/remove"
        answer = self.server.post(command, {"node": node["name"]})
        assert "status" not in answer, answer
        return lambda: self._add(node["name"], address)

    def _start_again(self, number: int) -> None:
        node = self._nodes[number]
        node.stop()
        self._nodes[number] = NodeProcess(node.folder, self._key, listen=node.address)

    def _add(self, name: str, address: str) -> None:
        """Adds a drained or removed node again. Repeats the request while the server refuses it because the node still
        drains.
        """
        assert self.server is not None
        while "status" in self.server.post("/v1/cluster/add", {"address": address}):
            pass

    def stop(self) -> None:
        for node in self._nodes:
            node.stop()
        for proxy in self._proxies.values():
            proxy.close()


class RayRig:
    """Nodes that Ray places: a head without CPUs, and machines with one CPU each."""

    kinds = ("agent killed", "agent stopped", "node killed", "node stopped", "raylet killed", "raylet stopped")

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self._folder, self._key, self._number = folder, new_key(folder), 0
        self._head = RayNode(folder, "head", "--head", "--port=0", "--num-cpus=0", "--include-dashboard=false")
        self._nodes: list[RayNode] = []
        self.server: ServerProcess | None = None
        self.settings = [
            "parallel_config.executor=ray",
            f"parallel_config.cluster_key_file={self._key}",
            f"parallel_config.ray_address={self._head.address()}",
        ]
        for _ in range(num_nodes):
            self._add_machine()

    def _add_machine(self) -> None:
        self._number += 1
        options = (f"--address={self._head.address()}", "--num-cpus=1")
        self._nodes.append(RayNode(self._folder, f"machine{self._number}", *options))

    def inject(self, kind: str, node: dict[str, Any]) -> Restore:
        if kind.startswith("agent"):
            return signal_agents(node, signal.SIGKILL if kind == "agent killed" else signal.SIGSTOP)
        host = psutil.Process(node["pid"])
        machine = next(each for each in self._nodes if host in each.hosts())
        if kind.startswith("node"):
            host.send_signal(signal.SIGKILL if kind == "node killed" else signal.SIGSTOP)
            return lambda: None
        raylet = machine.raylet()
        if kind == "raylet stopped":
            raylet.send_signal(signal.SIGSTOP)  # the node serves until Ray declares it dead
            return lambda: raylet.send_signal(signal.SIGCONT)
        assert kind == "raylet killed", kind
        raylet.kill()
        return lambda: self._replace(machine)

    def _replace(self, machine: RayNode) -> None:
        machine.stop()
        self._nodes.remove(machine)
        self._add_machine()

    def stop(self) -> None:
        for node in (*self._nodes, self._head):
            with contextlib.suppress(psutil.NoSuchProcess):
                node.stop()
