"""Tests the simulated cluster: its links, the loss of nodes, KV tiers, and the measured engine thread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llm_serving.scheduler.limits import Policy
from llm_serving.scheduler.output import ScheduledStep
from performance.program import UsageError
from performance.simulation.cluster import ClusterModel, ClusterOutcome, Loss, VirtualCluster
from performance.simulation.main import main
from performance.simulation.options import parse_options
from performance.simulation.workload import OpenLoop, SimulatedRequest
from support.fakes import make_limits


class SteadyDevice:
    """A device whose steps all take 10 ms."""

    name = "steady"

    def seconds(self, step: ScheduledStep) -> float:
        return 0.010


def simulated(
    cluster: ClusterModel, count: int = 40, every_s: float = 0.002, prompts: int = 0, **limits: Any
) -> ClusterOutcome:
    """Runs ``count`` requests of 16 tokens each. ``prompts``: number of different prompts; 0: all are different."""
    values = {"policy": Policy.CHUNKED, "num_blocks": 200, "max_num_seqs": 8, "decode_batch_size": 8, **limits}
    texts = [[2 + (7 * place + 3 * (each % (prompts or count))) % 40 for place in range(24)] for each in range(count)]
    requests = [SimulatedRequest(text, 16) for text in texts]
    source = OpenLoop(requests, [every_s * each for each in range(count)])
    outcome = VirtualCluster(make_limits(**values), SteadyDevice(), source, cluster).run()
    assert isinstance(outcome, ClusterOutcome)
    return outcome


def ends(outcome: ClusterOutcome) -> list[float]:
    assert all(record.failure is None for record in outcome.records)
    return [record.end or 0.0 for record in outcome.records]


def test_requests_are_served_on_all_replicas_and_a_run_repeats_exactly() -> None:
    outcome, again = (simulated(ClusterModel(3, 6)) for _ in range(2))
    assert ends(outcome) == ends(again)
    assert [sum(placed.values()) > 0 for placed in outcome.placed] == [True] * 6
    assert all(record.output_tokens == 16 for record in outcome.records)
    assert 0 < outcome.engine_share < 1


def test_the_latency_of_a_link_delays_each_step() -> None:
    near = simulated(ClusterModel(2, 2, latency_s=0.0), count=1)
    far = simulated(ClusterModel(2, 2, latency_s=0.050), count=1)
    steps = sum(near.steps.values())
    assert steps == sum(far.steps.values()) == 16
    # several steps are on the link at a time, so only the first one waits for the link in both directions
    assert ends(far)[0] - ends(near)[0] > 0.099


def test_the_replicas_of_a_node_share_the_bandwidth_of_its_link() -> None:
    narrow = ClusterModel(1, 4, bytes_per_s=20_000.0)
    shared, own = simulated(narrow), simulated(ClusterModel(4, 4, bytes_per_s=20_000.0))
    wide = simulated(ClusterModel(1, 4, bytes_per_s=1e12))
    assert max(ends(shared)) > 1.5 * max(ends(own))
    assert max(ends(own)) > max(ends(wide))


def test_a_lost_node_costs_no_request() -> None:
    loss = Loss(1, 0.035)
    outcome = simulated(ClusterModel(2, 4, losses=(loss,), notice_s=0.2, restart_s=0.3))
    undisturbed = simulated(ClusterModel(2, 4))
    assert outcome.losses == 1
    assert all(record.output_tokens == 16 for record in outcome.records)
    assert max(ends(outcome)) > max(ends(undisturbed))
    assert [end for end in ends(outcome) if end < loss.at_s + 0.2], "the other node serves on"


def test_blocks_come_back_from_the_tier_in_host_memory() -> None:
    """Several prompts come again and again, and each is evicted before it comes again."""
    tight = {"num_blocks": 14, "block_size": 4, "max_num_seqs": 1, "prefix_cache": True}
    common = {"count": 24, "every_s": 0.3, "prompts": 6}
    without = simulated(ClusterModel(1, 2), **common, **tight)
    tiers = simulated(ClusterModel(1, 2, tier_blocks=200), **common, **tight, has_tiers=True)
    assert tiers.tier_stored_blocks > 0
    assert tiers.tier_hit_blocks > 0
    assert tiers.prefix_hit_tokens > without.prefix_hit_tokens


def test_the_engine_thread_takes_the_measured_time() -> None:
    outcome = simulated(ClusterModel(2, 4, measures=True))
    assert set(outcome.calls) == {"accept a request", "schedule a step", "process a result"}
    assert outcome.calls["accept a request"][0] == 40
    assert all(cpu_s > 0 for _, cpu_s in outcome.calls.values())
    assert outcome.engine_busy_s > sum(cpu_s for _, cpu_s in outcome.calls.values())
    assert simulated(ClusterModel(2, 4)).calls == {}


BASE = ["--config", "llama_7b_kbk_pa_dyn.yaml", "--device", "ascend-910b", "-X", "20", "-T", "1", "--output-len", "4:8"]


def test_the_program_reports_nodes_and_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.json"
    assert main([*BASE, "--nodes", "2", "--replicas", "4", "--lose", "1@0.5", "--json", str(path)]) == 0
    [run] = json.loads(path.read_text())["policies"].values()
    assert (run["requests"], run["failed"], run["lost_nodes"]) == (20, 0, 1)
    assert run["link_bytes"] > 0
    text = capsys.readouterr().out
    assert "1 nodes were lost" in text
    assert "the engine thread worked" in text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--replicas", "4"], "need --nodes"),
        (["--nodes", "0"], "--nodes must be from 1"),
        (["--nodes", "2", "--lose", "2@1"], "--lose 2@1: the nodes are 0 to 1"),
        (["--nodes", "2", "--link-gbit", "0"], "--link-gbit above 0"),
    ],
)
def test_wrong_options_are_refused(options: list[str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_options([*BASE, *options])
