"""Tests the simulated cluster: its links, the loss of nodes, roles, KV tiers, and the measured engine thread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llm_serving.handover.pool import HandOverPool
from llm_serving.handover.threshold import PromptThreshold
from llm_serving.routing.placement import Role, Routing
from llm_serving.routing.prefill_split import PrefillSplit
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
    """Several prompts are sent repeatedly. The device cache evicts each prompt before its next request, so the tier has
    the hits.
    """
    tight = {"num_blocks": 14, "block_size": 4, "max_num_seqs": 1, "prefix_cache": True}
    common = {"count": 24, "every_s": 0.3, "prompts": 6}
    without = simulated(ClusterModel(1, 2), **common, **tight)
    tiers = simulated(ClusterModel(1, 2, tier_blocks=200), **common, **tight, has_tiers=True)
    assert tiers.tier_stored_blocks > 0
    assert tiers.tier_hit_blocks > 0
    assert tiers.prefix_hit_tokens > without.prefix_hit_tokens


ROLES = (Role.PREFILL, Role.DECODE)
POOL_BLOCKS = 60


def with_roles(cluster: ClusterModel, count: int = 40) -> ClusterOutcome:
    """Runs ``count`` requests on replicas of which one half computes the prompts and the other half decodes."""
    limits = make_limits(
        policy=Policy.CHUNKED, num_blocks=200, max_num_seqs=8, decode_batch_size=8, hands_over=True, prefix_cache=True
    )
    roles = ROLES * (cluster.num_replicas // 2)
    pool = HandOverPool(POOL_BLOCKS, limits.cache_namespace)
    split = PrefillSplit(roles, pool, PromptThreshold(limits.block_size, 1), limits.block_size)
    texts = [[2 + (7 * place + 3 * each) % 40 for place in range(24)] for each in range(count)]
    source = OpenLoop([SimulatedRequest(text, 16) for text in texts], [0.002 * each for each in range(count)])
    server = VirtualCluster(limits, SteadyDevice(), source, cluster, routing=Routing.PREFIX, split=split)
    outcome = server.run()
    assert isinstance(outcome, ClusterOutcome)
    assert all(record.output_tokens == 16 for record in outcome.records)
    assert pool.num_free == POOL_BLOCKS
    return outcome


def test_prefill_and_decode_are_on_different_nodes() -> None:
    outcome = with_roles(ClusterModel(2, 2, block_bytes=1000.0))
    assert outcome.hand_overs["completed"] == 40
    assert outcome.handed_bytes == 1000 * outcome.hand_overs["blocks"]
    assert [set(placed) for placed in outcome.placed] == [{"prompt"}, {"handed"}]
    on_one_node = with_roles(ClusterModel(1, 2, block_bytes=1000.0))
    assert (on_one_node.hand_overs["completed"], on_one_node.handed_bytes) == (40, 0)


def test_handed_blocks_take_the_bandwidth_of_the_links() -> None:
    near, far = (with_roles(ClusterModel(nodes, 2, block_bytes=40_000.0, bytes_per_s=1e6)) for nodes in (1, 2))
    transmission_s = far.handed_bytes / 1e6
    assert max(ends(far)) > transmission_s > max(ends(near))


def test_a_lost_node_loses_the_blocks_that_it_has_computed() -> None:
    """The link is slow, so blocks of the prefill node are still needed when the node stops."""
    narrow = {"block_bytes": 4000.0, "bytes_per_s": 1e6, "notice_s": 0.2, "restart_s": 0.3}
    outcome = with_roles(ClusterModel(4, 4, losses=(Loss(0, 0.08),), **narrow))
    assert outcome.hand_overs["misses"] > 0
    assert all(record.failure is None for record in outcome.records)


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


ON_A_CPU = [
    *("--config", "smollm2_135m_cpu.yaml", "-X", "10", "-T", "1", "--prompt-len", "300:600", "--output-len", "4:8"),
    *("--set", "parallel_config.data_parallel=2", "--set", "parallel_config.roles=[prefill, decode]"),
]


def test_the_program_repeats_the_roles_of_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "roles.json"
    assert main([*ON_A_CPU, "--nodes", "2", "--replicas", "4", "--json", str(path)]) == 0
    [run] = json.loads(path.read_text())["policies"].values()
    assert run["hand_overs"]["completed"] > 0
    assert [set(placed) - {"load", "prefix"} for placed in run["replicas"]] == [{"prompt"}, {"handed"}] * 2
    assert "hand-overs of" in capsys.readouterr().out
    assert main([*ON_A_CPU, "--nodes", "2", "--replicas", "3"]) == 2
    assert "use a multiple of 2" in capsys.readouterr().err


def test_the_program_simulates_pools_by_prompt_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pools.json"
    pools = "parallel_config.pools=[{name: short, max_prompt_tokens: 400}, {name: long}]"
    arguments = [*ON_A_CPU[:-1], pools, "--nodes", "2"]
    assert main([*arguments, "--json", str(path)]) == 0
    [run] = json.loads(path.read_text())["policies"].values()
    assert (run["requests"], run["failed"]) == (10, 0)
    assert [sum(placed.values()) > 0 for placed in run["replicas"]] == [True, True]
    assert main([*arguments, "--replicas", "4"]) == 2
    assert "--replicas 4: parallel_config.pools has 2 replicas" in capsys.readouterr().err


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
