"""Tests two replicas of the tiny model behind one server. Texts equal those of one replica, and no request is lost."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.server_process import ServerProcess, running_server
from support.time_limits import time_limit
from tools.replaying.main import main as replay

BEGINNINGS = ["Once upon a time there was a little fox. " * 4, "The sum of three and four is seven. " * 4]
PROMPTS = [f"{beginning}{number} and" for number in range(6) for beginning in BEGINNINGS]
REPLICAS = ["parallel_config.data_parallel=2", "scheduler_config.prefix_cache=true"]


def body(prompt: str, max_tokens: int = 40, **more: object) -> dict[str, object]:
    return {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.8, "seed": 7, "ignore_eos": True,
        "return_token_ids": True, **more,
    }  # fmt: skip


def ids_of(answer: Any) -> list[int]:
    assert "choices" in answer, answer
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def ask_all(server: ServerProcess, bodies: list[dict[str, object]]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda one: server.post("/v1/completions", one), bodies))


def wait_for(condition: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + time_limit(timeout_s)
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def expected(shallow_server: ServerProcess) -> dict[int, list[list[int]]]:
    """Returns the output tokens of each prompt on one replica, by ``max_tokens``."""
    ask = shallow_server.post
    return {length: [ids_of(ask("/v1/completions", body(p, length))) for p in PROMPTS] for length in (40, 200)}


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory, shallow_model: Path) -> Iterator[ServerProcess]:
    """Provides a server with two replicas. The tests of this file share the server and run in order. The last test
    stops it.
    """
    settings = [*REPLICAS, f"model_config.model_path={shallow_model}"]
    with running_server(tmp_path_factory.mktemp("replicas"), settings) as server:
        yield server


def test_texts_are_those_of_one_replica_and_both_are_used(
    replicas: ServerProcess, expected: dict[int, list[list[int]]]
) -> None:
    server = replicas
    assert len(server.agents()) == 2
    for round_number in range(2):
        answers = ask_all(server, [body(prompt) for prompt in PROMPTS])
        assert [ids_of(answer) for answer in answers] == expected[40], round_number
    # A prefix that many requests share may be in the caches of both replicas. The prefix of these questions is in one
    # cache only, and both replicas are idle. So the second question must go to the replica that served the first.
    for question in ("Who was it?", "Where was it?"):
        server.wait_until_idle()
        server.post("/v1/completions", body("A grey owl sat in a tree and looked at the moon. " * 4 + question))
    several = server.post("/v1/completions", body(PROMPTS[0], n=4))
    assert len(several["choices"]) == 4
    engine = server.wait_until_idle()
    ends = server.events("request_end")
    assert {event["replica"] for event in ends} == {0, 1}
    assert len({event["replica"] for event in ends[-4:]}) == 1, "samples of one prompt go to one replica"
    assert [one["state"] for one in engine["replicas"]] == ["ready", "ready"]
    assert all(one["steps"] > 0 for one in engine["replicas"])
    assert sum(sum(one["placed"].values()) for one in engine["replicas"]) == len(ends) == 2 * len(PROMPTS) + 6
    assert engine["replicas"][0]["placed"]["prefix"] + engine["replicas"][1]["placed"]["prefix"] > 0
    assert [agent["rank"] for agent in engine["agents"]] == [0, 1]


def test_a_killed_replica_loses_nothing(replicas: ServerProcess, expected: dict[int, list[list[int]]]) -> None:
    """Kills both replicas under load, the second when the first is ready again.

    The requests of a killed replica continue on the other replica.
    """
    server = replicas
    for round_number in range(2):
        with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
            asked = [pool.submit(server.post, "/v1/completions", body(prompt, 200)) for prompt in PROMPTS]
            wait_for(lambda: server.get("/server_info")["engine"]["running"] >= 8)
            victim = sorted(server.agents(), key=lambda agent: agent.pid)[0]
            victim.kill()
            wait_for(lambda number=round_number: len(server.events("agent_lost")) == number + 1)
            assert server.get("/server_info")["engine"]["state"] == "ready"
            assert [ids_of(answer.result()) for answer in asked] == expected[200]
        wait_for(lambda: all(one["state"] == "ready" for one in server.get("/server_info")["engine"]["replicas"]))
    engine = server.wait_until_idle()
    assert [event for event in server.events("request_end") if event["finish_reason"] == "error"] == []
    assert len({event["replica"] for event in server.events("agent_lost")}) == 2
    assert sum(one["recalled"] for one in engine["replicas"]) > 0


def test_the_recording_of_both_replicas_replays(replicas: ServerProcess) -> None:
    replicas.stop()
    flight = replicas.folder / "flight"
    assert sorted(path.name for path in flight.iterdir()) == ["replica_0", "replica_1"]
    assert replay([str(flight)]) == 0
