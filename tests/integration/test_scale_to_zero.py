"""Tests a server without a node. Requests wait until a node joins, and the server releases the node when they are
served.
"""

from __future__ import annotations

import concurrent.futures
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cluster import NodeProcess, new_key
from support.server_process import ServerProcess, running_server
from support.time_limits import time_limit

PROMPTS = [f"There was a little bird. {number} and" for number in range(6)]


def body(prompt: str) -> dict[str, object]:
    sampling = {"temperature": 0.8, "seed": 7, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": prompt, "max_tokens": 24, **sampling}


def ids_of(answer: dict) -> list[int]:
    assert "choices" in answer, answer
    return answer["choices"][0]["token_ids"]


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + time_limit(40)
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Scaled:
    """A server that finds its node by a name, and the commands of an autoscaler."""

    def __init__(self, folder: Path, key: Path, server: ServerProcess, port: int) -> None:
        self.folder, self.key, self.server, self.port = folder, key, server, port
        self.num_nodes = 0

    def state(self) -> tuple[str, float | None]:
        [model] = self.server.get("/v1/models")["data"]
        return model["state"], model["wake_seconds"]

    def new_node(self) -> NodeProcess:
        self.num_nodes += 1
        return NodeProcess(self.folder / f"node{self.num_nodes}", self.key, listen=f"127.0.0.1:{self.port}")

    def answers(self) -> list[list[int]]:
        """Sends requests without a node, then starts one. Returns the tokens after the node's agents have ended."""
        released = len(self.server.events("agent_released"))
        with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
            asked = [pool.submit(self.server.post, "/v1/completions", body(prompt)) for prompt in PROMPTS]
            wait_for(lambda: self.server.get("/server_info")["engine"]["waiting"] == len(PROMPTS))
            assert self.state()[0] == "loading"
            node = self.new_node()
            try:
                tokens = [ids_of(each.result()) for each in asked]
                wait_for(lambda: len(self.server.events("agent_released")) > released)
                wait_for(lambda: not node.agents())
            finally:
                node.stop()
        return tokens


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory):
    """Provides a server without a node. The tests of this file share the server and run in order."""
    folder, port = tmp_path_factory.mktemp("scaled"), free_port()
    key = new_key(folder)
    settings = [
        *("parallel_config.executor=nodes", "parallel_config.idle_s=1", f"parallel_config.cluster_key_file={key}"),
        *(f'parallel_config.nodes=["dns:localhost:{port}"]', "model_config.cpu_threads=1"),
    ]
    with running_server(folder / "server", settings) as server:
        yield Scaled(folder, key, server, port)


def test_a_server_is_ready_without_a_node(scaled: Scaled) -> None:
    assert scaled.server.get("/health/ready")["ready"] is True
    assert scaled.state() == ("sleeping", None)


@pytest.mark.parametrize("turn", ["first", "second"])
def test_all_requests_that_wait_for_a_node_are_served(scaled: Scaled, server: ServerProcess, turn: str) -> None:
    expected = [ids_of(server.post("/v1/completions", body(prompt))) for prompt in PROMPTS]
    assert scaled.answers() == expected
    state, wake_s = scaled.state()
    assert state == "sleeping"
    assert wake_s is not None
    assert wake_s > 0.3
    assert scaled.server.events("agent_lost") == [], "the node was given back before it ended"


def ask_in_haste(scaled: Scaled) -> tuple[int, dict, str | None]:
    """Sends a request with a deadline that is shorter than a start. Returns status, body and Retry-After."""
    data = json.dumps(body("Hello")).encode()
    headers = {"content-type": "application/json", "X-Deadline-Ms": "100"}
    request = urllib.request.Request(scaled.server.url + "/v1/completions", data, headers)
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, json.loads(reply.read()), None
    except urllib.error.HTTPError as refused:
        with refused as reply:
            return reply.code, json.loads(reply.read()), reply.headers["Retry-After"]


def test_a_request_whose_deadline_is_shorter_than_a_start_is_refused_and_wakes_nodes(scaled: Scaled) -> None:
    assert scaled.state()[0] == "sleeping"
    status, reply, retry_after = ask_in_haste(scaled)
    assert (status, reply["error"]["code"]) == (503, "model_unavailable")
    assert "the request may wait 0.1 s" in reply["error"]["message"]
    assert int(retry_after or 0) >= 1
    wait_for(lambda: scaled.state()[0] == "loading")
    waiting = "\nllm_serving_requests_waiting 1.0\n"
    assert waiting in scaled.server.get_text("/metrics"), "an autoscaler must start a machine"
    node = scaled.new_node()
    try:
        wait_for(lambda: ask_in_haste(scaled)[0] != 503 or scaled.state()[0] == "ready")
        wait_for(lambda: scaled.state()[0] == "sleeping" and not node.agents())
    finally:
        node.stop()
