"""Tests the settings of agents on other machines. A refusal names the setting that is missing or impossible."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llm_serving.config import Config
from llm_serving.errors import ConfigError, MemoryPlanError
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import estimate_memory, plan_memory, plan_node
from llm_serving.registry.arbiter import HOST, NODES
from llm_serving.registry.planned import PlannedModel, limits_of, need_of
from support.small_configs import small_config

SPAN, PAIR = "parallel_config.nodes_per_replica=2", ("parallel_config.tensor_parallel=2",)
REMOTE = ("parallel_config.executor=nodes", "parallel_config.cluster_key_file=/etc/cluster.key")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["parallel_config.executor=cloud"], "parallel_config.executor = 'cloud'"),
        (["parallel_config.executor=nodes"], "cluster_key_file = null: is missing; llm-serving cluster key FILE"),
        (["parallel_config.nodes=[a:1]"], "nodes = ['a:1']: has no effect with executor: local"),
        (
            ["parallel_config.executor=ray", "parallel_config.cluster_key_file=k", "parallel_config.nodes=[a:1]"],
            "is for executor: nodes; Ray has its own nodes",
        ),
        ([*PAIR, SPAN], "nodes_per_replica = 2: is for executor: nodes; with executor: local, a replica has"),
        ([*REMOTE, SPAN], "does not divide the agents of a replica (tensor_parallel x pipeline_parallel = 1) equally"),
        ([*REMOTE, SPAN, "parallel_config.pipeline_parallel=3"], "= 3) equally; use a divisor of 3"),
        (
            [*REMOTE, SPAN, *PAIR, "parallel_config.nodes=['10.0.0.5:1', '127.0.0.1:2']"],
            "nodes_per_replica = 2: needs nodes that reach each other, and 127.0.0.1:2 is an address of this machine",
        ),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, settings: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        small_config(tmp_path, settings)
    assert problem in str(refused.value).replace('"', "'")


@pytest.mark.parametrize(
    ("nodes", "is_noted"), [("['10.0.0.5:1']", True), ("['10.0.0.5:1', '10.0.0.6:1']", False), ("['dns:a:1']", False)]
)
def test_too_few_nodes_for_a_replica_are_noted(tmp_path: Path, nodes: str, is_noted: bool) -> None:
    config = small_config(tmp_path, [*REMOTE, SPAN, *PAIR, f"parallel_config.nodes={nodes}"])
    notes = [note for note in config.notes if "nodes has 1 of the 2 nodes that a replica needs" in note]
    assert len(notes) == is_noted


def test_a_config_of_nodes_counts_the_memory_of_one_node(tmp_path: Path) -> None:
    config = small_config(tmp_path, [*REMOTE, "parallel_config.data_parallel=3"])
    machine = Machine(1 << 20, "a very small machine")
    alone = estimate_memory(small_config(tmp_path), machine)
    assert plan_memory(config, machine).total_bytes == alone.total_bytes
    assert config.agent_threads(8) == 8
    assert Config.from_json(config.to_json()) == config


def test_the_plan_of_a_spanning_replica_is_that_of_the_fullest_node(tmp_path: Path) -> None:
    machine = Machine(1 << 40, "a large machine")
    stages = "parallel_config.pipeline_parallel=2"
    whole = estimate_memory(small_config(tmp_path, [stages]), machine)
    config = small_config(tmp_path, [*REMOTE, stages, SPAN])
    parallel = config.parallel_config
    assert [*map(list, parallel.ranks_of_machines)] == [[0], [1]]
    assert (parallel.agents_per_machine, [parallel.place_on_machine(rank) for rank in (0, 1)]) == (1, [0, 0])
    plan = estimate_memory(config, machine)
    own = [sum(item.num_bytes for item in items) for items in whole.ranks]
    assert plan.total_bytes == max(own) + whole.bytes_of("exchange") + whole.bytes_of("server process")
    assert config.agent_threads(8) == 8


def test_the_blocks_of_a_spanning_replica_fit_each_node(tmp_path: Path) -> None:
    config = small_config(tmp_path, [*REMOTE, "parallel_config.pipeline_parallel=2", SPAN])
    plan = estimate_memory(config, Machine(1 << 40, "a large machine"))
    alone = replace(plan, others=())
    [other] = plan.others
    assert other.total_bytes <= alone.total_bytes
    assert sorted([plan.first_rank, other.first_rank]) == [0, 1]
    large = replace(other, kv_bytes_per_token=2 * plan.kv_bytes_per_token)  # its blocks are larger
    largest = replace(plan, others=(large,)).largest_num_blocks
    assert largest is not None
    assert alone.largest_num_blocks is not None
    assert largest == large.largest_num_blocks < alone.largest_num_blocks
    without_cache = replace(other, kv_bytes_per_token=0)  # a stage with linear attention only
    assert replace(plan, others=(without_cache,)).largest_num_blocks == alone.largest_num_blocks
    assert replace(plan, others=(replace(without_cache, available_bytes=0),)).largest_num_blocks == 0


def test_agents_on_nodes_need_no_memory_of_the_server(tmp_path: Path) -> None:
    config = small_config(tmp_path, [*REMOTE, "parallel_config.data_parallel=3"])
    machine = Machine(1 << 30, "a small machine")
    need = need_of(config, machine)
    alone = need_of(small_config(tmp_path), machine)[HOST]
    assert need == {HOST: 0, NODES: 3 * alone}
    limits = limits_of([PlannedModel(config, need)], machine, memory_limit=1 << 20)
    assert NODES not in limits, "models_config.memory_limit is about this machine"
    with pytest.raises(MemoryPlanError, match=r"of 1\.0 MiB \(a node\): .*the largest|not even the weights"):
        plan_node(config, Machine(1 << 20, "a node"))
    assert "each node reports its own" in plan_memory(config, machine).table()


@pytest.mark.parametrize("executor", ["local", "ray"])
def test_only_nodes_can_be_given_back(tmp_path: Path, executor: str) -> None:
    settings = ["parallel_config.idle_s=5", f"parallel_config.executor={executor}", REMOTE[1]]
    with pytest.raises(ConfigError, match=f"idle_s = 5.0: is for executor: nodes; executor: {executor} keeps"):
        small_config(tmp_path, settings)
