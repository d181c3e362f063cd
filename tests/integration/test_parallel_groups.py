"""Tests groups of real agents through HTTP.

The texts equal those of one agent, and service continues after an agent is killed.
"""

from __future__ import annotations

import socket

import pytest

from support.agent_kills import Load, engine_of, kill_agent
from support.server_process import run_start_server, running_server
from support.small_configs import small_overrides
from support.time_limits import time_limit

ASK = {"prompt": "Once upon a time", "max_tokens": 64, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
LIMIT = "serving_config.agent_restart_limit=100"


def sets(**parallel: int) -> list[str]:
    return [f"parallel_config.{name}={value}" for name, value in parallel.items()]


def check_agents(server, alone, count):
    """Checks that ``count`` agents serve together and give the text of one agent.

    A completed stage of the start must show a single line for all agents. A group always compiles its graphs. It shows
    no line for weights that an earlier test left in the cache. A slow stage shows further lines with "so far".
    """
    agents = engine_of(server)["agents"]
    assert [agent["rank"] for agent in agents] == list(range(count))
    assert len(server.agents()) == count
    lines = [line for line in server.stderr().splitlines() if ": compile" in line]
    assert len([line for line in lines if "so far" not in line]) == 1
    found, wanted = (each.post("/v1/completions", ASK)["choices"][0]["token_ids"] for each in (server, alone))
    assert found == wanted


NATIVE = ["model_config.op_table=native", "model_config.model_dtype=bfloat16"]


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        pytest.param([], (1,), id="fused"),
        pytest.param(NATIVE, (0,), id="native, whose steps are replays", marks=pytest.mark.sweep),
    ],
)
def test_agents_of_a_pair_killed_under_load(tmp_path, shallow_server, shallow_model, settings, ranks):
    model = f"model_config.model_path={shallow_model}"
    with running_server(tmp_path, [model, *sets(tensor_parallel=2), LIMIT, *settings]) as server:
        if not settings:
            check_agents(server, shallow_server, 2)
        addresses = [agent["address"] for agent in engine_of(server)["agents"]]
        with Load(server) as load:
            kills = []
            for nth, rank in enumerate(ranks):
                load.wait_for_more()
                kills.append(kill_agent(server, rank, nth))
            load.wait_for_more()
        assert load.wrong == []
        assert load.failed == [], "what was in flight is computed again"
        assert all(kill.noticed_s < time_limit(1.0) for kill in kills), kills
        lost = server.events("agent_lost")
        assert [event["message"].split(",")[0] for event in lost] == [f"agent {rank}" for rank in ranks]
        assert len(server.agents()) == 2
        server.wait_until_idle()
    for address in addresses:
        host, port = address.split(":")
        with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
            probe.connect((host, int(port)))


@pytest.mark.sweep
def test_a_replica_serves_while_the_other_comes_back(tmp_path, server):
    alone = server
    with running_server(tmp_path, [*sets(tensor_parallel=2, data_parallel=2), LIMIT]) as server:
        check_agents(server, alone, 4)
        with Load(server) as load:
            load.wait_for_more()
            kill = kill_agent(server, 3, 0)
            assert [agent["restarts"] for agent in engine_of(server)["agents"]] == [0, 0, 1, 1]
        assert load.wrong == []
        assert load.failed == []
        assert kill.noticed_s < time_limit(1.0)
        server.wait_until_idle()


@pytest.mark.parametrize(
    ("settings", "phrases"),
    [
        (["tensor_parallel=9"], ["parallel_config.tensor_parallel = 9", "query heads: at most"]),
        (["pipeline_parallel=100"], ["parallel_config.pipeline_parallel = 100", "layers, and each stage needs one"]),
        (["tensor_parallel=2", "agent_ports=[16002]"], ["agent_ports = [16002]", "2 agents", "and 1 ports"]),
        (["tensor_parallel=-1"], ["tensor_parallel = -1", "must be at least 1"]),
        (["data_parallel=two"], ["data_parallel = 'two'", "must be an integer"]),
    ],
)
def test_impossible_splits_are_refused(tmp_path, settings, phrases):
    named = [f"serving_config.{each}" if "ports" in each else f"parallel_config.{each}" for each in settings]
    overrides = small_overrides(tmp_path, named)
    run = run_start_server("--config", "llama_tiny_cpu.yaml", *[part for each in overrides for part in ("--set", each)])
    assert run.returncode == 2
    assert run.stderr.startswith("error: command line: ")
    assert all(phrase in run.stderr for phrase in phrases), run.stderr
