"""Groups of real agents through HTTP: the same text, and life goes on when one is killed."""

from __future__ import annotations

import socket

import pytest

from support.agent_kills import Load, engine_of, kill_agent
from support.server_process import run_start_server, running_server
from support.small_configs import small_overrides

ASK = {"prompt": "Once upon a time", "max_tokens": 64, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
LIMIT = "serving_config.agent_restart_limit=100"


def sets(**parallel: int) -> list[str]:
    return [f"parallel_config.{name}={value}" for name, value in parallel.items()]


def test_the_text_of_one_agent_and_of_many(tmp_path):
    texts = {}
    shapes = [{}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"tensor_parallel": 2, "data_parallel": 2}]
    for index, parallel in enumerate(shapes):
        with running_server(tmp_path / str(index), sets(**parallel)) as server:
            answer = server.post("/v1/completions", ASK)
            texts[str(parallel)] = answer["choices"][0]["token_ids"]
            size = parallel.get("tensor_parallel", 1) * parallel.get("pipeline_parallel", 1)
            agents = engine_of(server)["agents"]
            assert [agent["rank"] for agent in agents] == list(range(size * parallel.get("data_parallel", 1)))
            assert len(server.agents()) == len(agents)
            lines = [line for line in server.stderr().splitlines() if ": load" in line]
            assert len(lines) == 1, "one line for the stage of all agents"
            server.wait_until_idle()
    assert len({tuple(tokens) for tokens in texts.values()}) == 1, texts


NATIVE = ["model_config.op_table=native", "model_config.model_dtype=bfloat16"]


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        pytest.param([], (1, 0, 1), id="fused"),
        pytest.param(NATIVE, (0,), id="native, whose steps are replays", marks=pytest.mark.sweep),
    ],
)
def test_agents_of_a_pair_killed_under_load(tmp_path, settings, ranks):
    with running_server(tmp_path, [*sets(tensor_parallel=2), LIMIT, *settings]) as server:
        addresses = [agent["address"] for agent in engine_of(server)["agents"]]
        with Load(server) as load:
            kills = []
            for nth, rank in enumerate(ranks):
                load.wait_for_more()
                kills.append(kill_agent(server, rank, nth))
            load.wait_for_more()
        assert load.wrong == []
        assert load.failed == [], "what was in flight is computed again"
        assert all(kill.noticed_s < 1.0 for kill in kills), kills
        lost = server.events("agent_lost")
        assert [event["message"].split(",")[0] for event in lost] == [f"agent {rank}" for rank in ranks]
        assert len(server.agents()) == 2
        server.wait_until_idle()
    for address in addresses:
        host, port = address.split(":")
        with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
            probe.connect((host, int(port)))


def test_a_replica_serves_while_the_other_comes_back(tmp_path):
    with running_server(tmp_path, [*sets(tensor_parallel=2, data_parallel=2), LIMIT]) as server:
        with Load(server) as load:
            load.wait_for_more()
            kill = kill_agent(server, 3, 0)
            assert [agent["restarts"] for agent in engine_of(server)["agents"]] == [0, 0, 1, 1]
        assert load.wrong == []
        assert load.failed == []
        assert kill.noticed_s < 1.0
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
    run = run_start_server(*[part for each in overrides for part in ("--set", each)])
    assert run.returncode == 2
    assert run.stderr.startswith("error: --set: ")
    assert all(phrase in run.stderr for phrase in phrases), run.stderr
