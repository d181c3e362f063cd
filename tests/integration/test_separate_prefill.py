"""Tests a prefill and a decode replica of the tiny model behind one server, also when agents are killed."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.server_process import ServerProcess, running_server, shm_entries
from support.session_files import call, put
from support.time_limits import time_limit
from tools.replaying.main import main as replay

LONG = [f"Once upon a time there was a little fox number {number}. " * 12 for number in range(4)]
SHORT = [f"The sum of {number} and four is" for number in range(4)]
ROLES = [
    *("parallel_config.data_parallel=2", "parallel_config.roles=[prefill, decode]"),
    *("parallel_config.prefill_threshold=64", "scheduler_config.prefix_cache=true"),
]


def body(prompt: str, max_tokens: int = 24) -> dict[str, object]:
    return {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.8, "seed": 7, "ignore_eos": True,
        "return_token_ids": True, "frequency_penalty": 0.5,
    }  # fmt: skip


def ids_of(answer: Any) -> list[int]:
    assert "choices" in answer, answer
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def ask_all(server: ServerProcess, prompts: list[str]) -> list[list[int]]:
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ids_of(server.post("/v1/completions", body(prompt))), prompts))


@pytest.fixture(scope="module")
def expected(shallow_server: ServerProcess) -> list[list[int]]:
    """Returns the tokens of a server without roles."""
    return ask_all(shallow_server, LONG + SHORT)


@pytest.fixture(scope="module")
def roles(shallow_model: Path) -> list[str]:
    """Returns the settings of a server of the shallow model with two roles."""
    return [*ROLES, f"model_config.model_path={shallow_model}"]


@pytest.fixture(scope="module")
def separate(roles: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Provides a server with two roles. The tests of this file run in order, and the last one stops the server."""
    with running_server(tmp_path_factory.mktemp("separate"), roles) as server:
        yield server


def test_texts_are_those_of_a_server_without_roles(separate: ServerProcess, expected: list[list[int]]) -> None:
    assert ask_all(separate, LONG + SHORT) == expected
    engine = separate.wait_until_idle()
    figures = engine["hand_overs"]
    assert (figures["completed"], figures["misses"], figures["refused"]) == (len(LONG), 0, 0)
    assert figures["pool_free_blocks"] == figures["pool_blocks"]
    assert engine["replicas"][0]["placed"]["prompt"] == engine["replicas"][1]["placed"]["handed"] == len(LONG)
    assert separate.counter("hand_overs") == len(LONG)


def agent_of(server: ServerProcess, rank: int) -> int:
    """Returns the process id of an agent, when both agents are ready."""
    wait_for(lambda: all(one["state"] == "ready" for one in engine_of(server)["replicas"]))
    pid: int = engine_of(server)["agents"][rank]["pid"]
    return pid


def engine_of(server: ServerProcess) -> Any:
    return server.get("/server_info")["engine"]


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + time_limit(timeout_s)
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def test_a_damaged_pool_is_a_miss(separate: ServerProcess) -> None:
    """Overwrites the hand-over pool with zeros while blocks wait in it for the stopped decode agent."""
    [name] = shm_entries(separate.pid)
    prompt = "A grey owl sat in a tree and looked at the moon. " * 12
    decode_agent, before = agent_of(separate, 1), engine_of(separate)["replicas"][1]["placed"]["handed"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        os.kill(decode_agent, signal.SIGSTOP)
        try:
            answer = pool.submit(ask_all, separate, [prompt])
            wait_for(lambda: engine_of(separate)["replicas"][1]["placed"]["handed"] > before)
            size = Path("/dev/shm", name).stat().st_size
            with Path("/dev/shm", name).open("r+b") as damaged:
                damaged.write(bytes(size))
        finally:
            os.kill(decode_agent, signal.SIGCONT)
        tokens = answer.result()
    figures = separate.wait_until_idle()["hand_overs"]
    assert figures["misses"] == 1
    assert figures["pool_free_blocks"] == figures["pool_blocks"]
    [event] = separate.events("hand_over_missed")
    assert event["blocks"] > 0
    assert ask_all(separate, [prompt]) == tokens


@pytest.mark.parametrize("rank", [0, 1])
def test_either_agent_may_die(separate: ServerProcess, expected: list[list[int]], rank: int) -> None:
    victim = agent_of(separate, rank)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_all, separate, LONG + SHORT)
        os.kill(victim, signal.SIGKILL)
        assert answers.result() == expected
    figures = separate.wait_until_idle()["hand_overs"]
    assert figures["pool_free_blocks"] == figures["pool_blocks"]


def test_recordings_replay_after_the_end(separate: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    separate.stop()
    assert not shm_entries(separate.pid)
    assert replay([str(separate.folder / "flight")]) == 0
    assert capsys.readouterr().out.count("identical, ") == 2


OWLS = [[f"{name} owl {number} sat in a tree and looked at the moon. " * 12 for number in range(3)] for name in "AB"]


def ask_greedily(server: ServerProcess, prompts: list[str]) -> list[list[int]]:
    def ask(prompt: str) -> list[int]:
        return ids_of(server.post("/v1/completions", {**body(prompt, 40), "temperature": 0, "frequency_penalty": 0}))

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts))


def test_a_draft_model_computes_handed_prompts_again(
    tmp_path: Path, roles: list[str], shallow_model: Path, shallow_server: ServerProcess
) -> None:
    """The draft model is the model itself, so each draft is right if the draft model knows the whole prompt.

    Then the agents are killed, first that of the decode replica.
    """
    prompts = LONG + OWLS[0] + OWLS[1]
    expected = dict(zip(prompts, ask_greedily(shallow_server, prompts), strict=True))
    drafts = [
        *("speculative_config.method=draft", f"speculative_config.model={shallow_model}"),
        *("speculative_config.always=true", "speculative_config.max_draft_tokens=4"),
    ]
    with running_server(tmp_path, [*roles, *drafts]) as separate:
        for prompt in LONG:
            assert ask_greedily(separate, [prompt]) == [expected[prompt]]
        assert separate.wait_until_idle()["hand_overs"]["completed"] == len(LONG)
        drafted, accepted = separate.counter("draft_tokens"), separate.counter("accepted_draft_tokens")
        assert accepted == drafted
        assert accepted > 0.5 * sum(len(expected[prompt]) for prompt in LONG)
        for rank, prompts in zip((1, 0), OWLS, strict=True):
            victim, before = agent_of(separate, rank), engine_of(separate)["replicas"][1]["placed"]["handed"]
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                answers = pool.submit(ask_greedily, separate, prompts)
                wait_for(lambda before=before: engine_of(separate)["replicas"][1]["placed"]["handed"] > before)
                os.kill(victim, signal.SIGKILL)
                assert answers.result() == [expected[prompt] for prompt in prompts]
        figures = separate.wait_until_idle()["hand_overs"]
        assert figures["pool_free_blocks"] == figures["pool_blocks"]


def test_kv_tiers_keep_the_blocks_of_both_roles(
    tmp_path: Path, roles: list[str], expected: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The device has so few blocks that it evicts the prompts. A session is exported from a handed request."""
    tiers = [
        *("kv_tier_config.host_blocks=100", "pa_config.num_blocks=40", "pa_config.decode_seq_length=512"),
        *("model_config.seq_length=[512]", "model_config.max_generate_length=512"),
        *(f"kv_tier_config.ssd_folder={tmp_path / 'tier'}", "kv_tier_config.loads=always"),
    ]
    with running_server(tmp_path, [*roles, *tiers]) as server:
        for _ in range(2):
            assert ask_all(server, LONG + SHORT) == expected
        hits = server.get_text("/metrics").partition('kv_tier_hit_blocks_total{tier="host"} ')[2].split()[0]
        assert float(hits) > 0
        assert server.wait_until_idle()["hand_overs"]["completed"] >= len(LONG)
        tokens = ids_of(server.post("/v1/completions", {**body(LONG[0]), "session_id": "trip"}))
        assert tokens == expected[0]
        imported = put(server, call(server, "GET", "/v1/sessions/trip")[1], "other")
        assert imported["differences"] == []
        assert imported["resumed_tokens"] >= 16
        assert ids_of(server.post("/v1/completions", {**body(LONG[0]), "session_id": "other"})) == tokens
        wait_for(lambda: server.counter("kv_tier_ssd_written_blocks") > 0)
        server.wait_until_idle()
    assert replay([str(tmp_path / "flight")]) == 0
    assert capsys.readouterr().out.count("identical, ") == 2
