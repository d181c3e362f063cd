"""Tests a prefill and a decode replica on two nodes: blocks travel from node to node, also when nodes are killed."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_serving.config import load_config
from llm_serving.ipc.hand_over_memory import HandOverLayout
from support.cluster import LinkProxy, NodeProcess, new_key
from support.pool_memory import pool_memories
from support.server_process import ServerProcess, running_server, shm_entries
from support.time_limits import time_limit

LONG = [f"Once upon a time there was a little fox number {number}. " * 12 for number in range(3)]
SHORT = [f"The sum of {number} and four is" for number in range(3)]
ROLES = [
    *("parallel_config.data_parallel=2", "parallel_config.roles=[prefill, decode]"),
    *("parallel_config.prefill_threshold=64", "model_config.cpu_threads=1"),
    *("serving_config.agent_restart_limit=20", "parallel_config.executor=nodes", "kv_tier_config.host_blocks=64"),
]


def body(prompt: str) -> dict[str, object]:
    return {
        "prompt": prompt, "max_tokens": 24, "temperature": 0.8, "seed": 7, "ignore_eos": True, "return_token_ids": True,
        "frequency_penalty": 0.5, "logprobs": 1,
    }  # fmt: skip


def answer_of(server: ServerProcess, prompt: str) -> tuple[list[int], Any]:
    """Returns the tokens of an answer and their log-probabilities, which must have the same bits."""
    answer: Any = server.post("/v1/completions", body(prompt))
    assert "choices" in answer, answer
    return answer["choices"][0]["token_ids"], answer["choices"][0]["logprobs"]


def wait_for(condition: Callable[[], Any], timeout_s: float = 40.0) -> None:
    deadline = time.monotonic() + time_limit(timeout_s)
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


@dataclass
class Split:
    """A server with two roles, and its nodes. The node of a role is behind a proxy."""

    server: ServerProcess
    key: Path
    nodes: dict[str, NodeProcess]
    """The nodes, by the address of their proxies."""

    def engine(self) -> Any:
        return self.server.get("/server_info")["engine"]

    def hand_overs(self) -> dict[str, int]:
        figures: dict[str, int] = self.server.wait_until_idle()["hand_overs"]
        assert figures["pool_free_blocks"] == figures["pool_blocks"]
        return figures

    def free_pool_blocks(self) -> int:
        return int(self.engine()["hand_overs"]["pool_free_blocks"])

    def is_ready(self) -> bool:
        return [each["state"] for each in self.server.get("/v1/cluster")["replicas"]] == ["ready", "ready"]

    def node_of(self, replica: int) -> NodeProcess:
        wait_for(self.is_ready)
        nodes = self.server.get("/v1/cluster")["nodes"]
        return self.nodes[next(each["address"] for each in nodes if each["replica"] == replica)]

    def ask_all(self, prompts: list[str]) -> list[tuple[list[int], Any]]:
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: answer_of(self.server, prompt), prompts))

    def restart(self, killed: NodeProcess) -> None:
        address = next(address for address, node in self.nodes.items() if node is killed)
        killed.stop()
        self.nodes[address] = NodeProcess(killed.folder, self.key, listen=killed.address)


@contextmanager
def stopped(process: int) -> Iterator[None]:
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


@pytest.fixture(scope="module")
def proxies() -> list[LinkProxy]:
    return []


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory, shallow_model: Path, proxies: list[LinkProxy]) -> Iterator[Split]:
    """Provides a server with both roles on two nodes. The tests of this file share the server and run in order."""
    folder = tmp_path_factory.mktemp("separate_nodes")
    key = new_key(folder)
    started = [NodeProcess(folder / f"node{number}", key) for number in range(2)]
    proxies += [LinkProxy(node.port) for node in started]
    nodes = dict(zip([proxy.address for proxy in proxies], started, strict=True))
    settings = [
        *ROLES, f"model_config.model_path={shallow_model}", f"parallel_config.cluster_key_file={key}",
        f"parallel_config.nodes={json.dumps(list(nodes))}",
    ]  # fmt: skip
    try:
        with running_server(folder / "server", settings) as server:
            made = Split(server, key, nodes)
            wait_for(made.is_ready)
            yield made
    finally:
        for node in nodes.values():
            node.stop()
        for proxy in proxies:
            proxy.close()


@pytest.fixture(scope="module")
def expected(shallow_server: ServerProcess) -> list[tuple[list[int], Any]]:
    """Returns the answers of a server with one local replica."""
    return [answer_of(shallow_server, prompt) for prompt in LONG + SHORT]


def test_texts_are_those_of_one_replica(split: Split, expected: list[tuple[list[int], Any]]) -> None:
    assert split.ask_all(LONG + SHORT) == expected
    figures = split.hand_overs()
    assert (figures["completed"], figures["misses"], figures["failed_transfers"]) == (len(LONG), 0, 0)
    assert figures["transfer_seconds"] > 0.0
    placed = [each["placed"] for each in split.engine()["replicas"]]
    assert (placed[0]["prompt"], placed[1]["handed"]) == (len(LONG), len(LONG))
    assert not shm_entries(split.server.pid), "the server has no blocks itself"


def new_prompt(name: str) -> str:
    return f"A {name} owl sat in a tree and looked at the moon. " * 12


@contextmanager
def held_before_loading(split: Split, prompt: str) -> Iterator[concurrent.futures.Future[Any]]:
    """Asks for an answer. Inside the ``with`` block, the answer's blocks are in the pool of the decode node, whose
    agent is stopped.
    """
    [agent] = split.node_of(1).agents()
    before = split.engine()["replicas"][1]["placed"]["handed"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with stopped(agent.pid):
            answer = pool.submit(answer_of, split.server, prompt)
            wait_for(lambda: split.engine()["replicas"][1]["placed"]["handed"] > before)
            yield answer
        answer.result()


@pytest.fixture(scope="module")
def layout(shallow_model: Path) -> HandOverLayout:
    """Returns the sizes of the hand-over pool of a node."""
    settings = [each for each in ROLES if "executor" not in each]
    found = HandOverLayout.of(
        load_config("llama_tiny_cpu.yaml", [*settings, f"model_config.model_path={shallow_model}"]), 0
    )
    assert found is not None
    return found


def test_a_flipped_bit_is_a_miss(split: Split, shallow_server: ServerProcess, layout: HandOverLayout) -> None:
    prompt, [pool] = new_prompt("grey"), pool_memories(split.node_of(1).pid, layout)
    with held_before_loading(split, prompt) as answer:
        content = pool.read()
        written = np.flatnonzero(pool.headers(content).any(axis=1))
        assert written.size
        for block in written.tolist():
            content[layout.first_block + block * layout.block_bytes + 1000] ^= 4
        pool.write(content)
    assert answer.result() == answer_of(shallow_server, prompt)
    assert split.hand_overs()["misses"] == 1


def test_blocks_of_an_earlier_hand_over_are_a_miss(
    split: Split, shallow_server: ServerProcess, layout: HandOverLayout
) -> None:
    """The blocks in the pool have the right numbers and checksums, but an old generation. The decode node must refuse
    them.
    """
    [pool] = pool_memories(split.node_of(1).pid, layout)
    earlier, prompt = pool.read(), new_prompt("brown")
    with held_before_loading(split, prompt) as answer:
        differs = pool.headers(pool.read()) != pool.headers(earlier)
        assert pool.headers(earlier)[differs.any(axis=1)].any(axis=1).any(), "no block was used before"
        pool.write(earlier)
    assert answer.result() == answer_of(shallow_server, prompt)
    assert split.hand_overs()["misses"] == 2
    assert split.server.events("hand_over_missed")[-1]["blocks"] > 0


def test_the_decode_node_may_die_with_the_blocks(split: Split, shallow_server: ServerProcess) -> None:
    """The node is killed during the step that copies the blocks to its device."""
    prompt, killed = new_prompt("white"), split.node_of(1)
    before = split.hand_overs()
    with held_before_loading(split, prompt) as answer:
        killed.send_signal(signal.SIGKILL)
        assert answer.result() == answer_of(shallow_server, prompt)
    after = split.hand_overs()
    assert (after["completed"], after["misses"]) == (before["completed"], before["misses"])
    split.restart(killed)


@pytest.mark.parametrize("victim", [0, 1])
def test_either_node_may_die_while_blocks_travel(
    split: Split, shallow_server: ServerProcess, proxies: list[LinkProxy], victim: int
) -> None:
    """The proxy of the decode node holds all bytes until one of the nodes is dead."""
    prompt, nodes = new_prompt(f"black {victim}"), [split.node_of(replica) for replica in range(2)]
    before = split.hand_overs()
    proxy = next(each for each in proxies if split.nodes[each.address] is nodes[1])
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        proxy.hold(held=True)
        try:
            answer = pool.submit(answer_of, split.server, prompt)
            # A request in the router's queue counts as waiting, too. With blocks of the pool, it has left the queue.
            wait_for(lambda: split.free_pool_blocks() < before["pool_blocks"])
            wait_for(lambda: split.engine()["waiting"])
            nodes[victim].send_signal(signal.SIGKILL)
        finally:
            proxy.hold(held=False)
        assert answer.result() == answer_of(shallow_server, prompt)
    after = split.hand_overs()
    split.restart(nodes[victim])
    num_ends = [each["failed_transfers"] + each["reloads"] for each in (before, after)]
    assert num_ends[1] == num_ends[0] + 1, "the transfer has ended before the node was dead"


def test_after_all_losses_prompts_are_handed_over_again(split: Split, shallow_server: ServerProcess) -> None:
    wait_for(split.is_ready)
    prompt, before = new_prompt("red"), split.hand_overs()
    assert answer_of(split.server, prompt) == answer_of(shallow_server, prompt)
    assert split.hand_overs()["completed"] == before["completed"] + 1
