"""Tests a prefill and a decode replica of the tiny model behind one server, also when agents are killed."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.server_process import ServerProcess, running_server, shm_entries
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
def expected(server: ServerProcess) -> list[list[int]]:
    """Returns the tokens of a server without roles."""
    return [ids_of(server.post("/v1/completions", body(prompt))) for prompt in LONG + SHORT]


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with two roles. The tests of this file run in order, and the last one stops it."""
    with running_server(tmp_path_factory.mktemp("separate"), ROLES) as server:
        yield server


def test_texts_are_those_of_a_server_without_roles(separate: ServerProcess, expected: list[list[int]]) -> None:
    assert ask_all(separate, LONG + SHORT) == expected
    engine = separate.wait_until_idle()
    figures = engine["hand_overs"]
    assert (figures["completed"], figures["misses"], figures["refused"]) == (len(LONG), 0, 0)
    assert figures["pool_free_blocks"] == figures["pool_blocks"]
    assert engine["replicas"][0]["placed"]["prompt"] == engine["replicas"][1]["placed"]["handed"] == len(LONG)
    assert separate.counter("hand_overs") == len(LONG)


def test_a_damaged_pool_is_a_miss(separate: ServerProcess) -> None:
    """Writes zeros over the whole pool, again and again, while a prompt is handed over."""
    [name] = shm_entries(separate.pid)
    prompts = [f"A {colour} owl sat in a tree and looked at the moon. " * 12 for colour in ("grey", "white", "red")]
    done = False
    with concurrent.futures.ThreadPoolExecutor(1) as pool, Path("/dev/shm", name).open("r+b") as damaged:
        answers = pool.submit(ask_all, separate, prompts)
        while not done:
            os.pwrite(damaged.fileno(), bytes(1 << 16), 0)
            done = answers.done()
    figures = separate.wait_until_idle()["hand_overs"]
    assert figures["misses"] > 0
    assert figures["pool_free_blocks"] == figures["pool_blocks"]
    assert separate.events("hand_over_missed")
    assert ask_all(separate, prompts) == answers.result()


@pytest.mark.parametrize("rank", [0, 1])
def test_either_agent_may_die(separate: ServerProcess, expected: list[list[int]], rank: int) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_all, separate, LONG + SHORT)
        separate.agents()[rank].kill()
        assert answers.result() == expected
    figures = separate.wait_until_idle()["hand_overs"]
    assert figures["pool_free_blocks"] == figures["pool_blocks"]


def test_recordings_replay_after_the_end(separate: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    separate.stop()
    assert not shm_entries(separate.pid)
    assert replay([str(separate.folder / "flight")]) == 0
    assert capsys.readouterr().out.count("identical, ") == 2
