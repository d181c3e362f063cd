"""Runs one simulated load test and measures it like a real one."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from llm_serving.engine.schedulers import prompt_pools
from llm_serving.routing.placement import Routing
from performance.load.client import LoadRun
from performance.load.endpoint import Endpoint
from performance.load.options import LoadOptions
from performance.load.report import report_json
from performance.load.statistics import LoadFigures, measure
from performance.program import UsageError
from performance.simulation.cluster import ClusterModel, ClusterOutcome, VirtualCluster
from performance.simulation.roles import simulated_split
from performance.simulation.server import Outcome, VirtualServer
from performance.simulation.setup import Setup
from performance.simulation.workload import Source

__all__ = ["NOWHERE", "SimulatedRun", "simulate"]

NOWHERE = Endpoint("simulated", 0)
"""Address that stands for a simulated server, which has none."""


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The result of a simulation. ``name`` identifies the run in a comparison."""

    name: str
    run: LoadRun
    figures: LoadFigures
    outcome: Outcome
    device: str
    cpu_s: float
    """Processor time that the simulation took."""

    @property
    def device_share(self) -> float:
        """Fraction of the run's time in which the devices were busy."""
        total = self.figures.total_time_s * self.outcome.num_replicas
        return self.outcome.device_busy_s / total if total > 0 else 0.0

    def as_json(self, *, per_request: bool = True) -> dict[str, Any]:
        """Returns the JSON of a load test for this run, and adds counts that a real client cannot see."""
        content = report_json(self.run, self.figures)
        content["options"]["url"] = f"simulated {self.device}"
        if not per_request:
            del content["per_request"]
        outcome = self.outcome
        return content | {
            "device": self.device,
            "preemptions": outcome.preemptions,
            "swaps": outcome.swaps,
            "prefix_hit_tokens": outcome.prefix_hit_tokens,
            "kv_waste": outcome.kv_waste,
            "prefix_hit_share": outcome.prefix_hit_share,
            "replicas": outcome.placed,
            "peak_running": outcome.peak_running,
            "peak_waiting": outcome.peak_waiting,
            "device_busy_share": self.device_share,
            "steps": outcome.steps,
            "step_seconds": outcome.step_s,
            "hand_overs": outcome.hand_overs,
            "simulation_cpu_s": self.cpu_s,
            **(outcome.as_json() if isinstance(outcome, ClusterOutcome) else {}),
        }


def simulate(
    name: str, setup: Setup, source: Source, options: LoadOptions, cluster: ClusterModel | None = None
) -> SimulatedRun:
    """Simulates the requests of ``source`` until every request has ended. ``cluster``: the nodes of the replicas."""
    start = time.process_time()
    outcome = _server(setup, source, options, cluster).run()
    run = LoadRun(options, setup.config.model_name, outcome.records, 0.0, 0.0, 0.0, interrupted=False)
    figures = measure(run)
    return SimulatedRun(name, run, figures, outcome, setup.device.name, time.process_time() - start)


def _server(setup: Setup, source: Source, options: LoadOptions, cluster: ClusterModel | None) -> VirtualServer:
    config, limits = setup.config, setup.limits
    routing, common = Routing(config.parallel_config.routing), (limits, setup.device, source)
    num_replicas = (0 if cluster is None else cluster.num_replicas) or config.parallel_config.data_parallel
    split, pools = simulated_split(config, limits, num_replicas), prompt_pools(config)
    if pools is not None and num_replicas != config.parallel_config.data_parallel:
        raise UsageError(
            f"--replicas {num_replicas}: parallel_config.pools has {config.parallel_config.data_parallel} replicas; "
            "they must agree"
        )
    if cluster is None:
        return VirtualServer(*common, setup.host, setup.spread, options.seed, num_replicas, routing, split, pools)
    cluster = replace(
        cluster,
        num_replicas=num_replicas,
        tier_blocks=config.kv_tier_config.host_blocks,
        block_bytes=config.kv_bytes_per_token * config.pa_config.block_size,
    )
    return VirtualCluster(*common, cluster, setup.host, setup.spread, options.seed, routing, split, pools)
