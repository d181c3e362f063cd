"""Prometheus metrics of the nodes of a server. They are absent if the agents are on the server's machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

STATES = ("connecting", "free", "used", "draining", "drained", "down", "refused")
"""The values of ``NodeState``. This module does not import it, because most servers have no nodes."""


class NodeStates(Protocol):
    """The part of a pool of nodes that the metrics show."""

    def status(self) -> Sequence[Mapping[str, object]]: ...


class NodeCollector(Collector):
    """Collects the number of nodes in each state. ``nodes`` returns None if the server has no nodes."""

    def __init__(self, nodes: Callable[[], NodeStates | None]) -> None:
        self._nodes = nodes

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        nodes = self._nodes()
        if nodes is None:
            return
        states = [status["state"] for status in nodes.status()]
        family = GaugeMetricFamily("llm_serving_nodes", "Nodes by their present state.", labels=["state"])
        for state in STATES:
            family.add_metric([state], states.count(state))
        yield family
