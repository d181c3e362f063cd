"""Tests LoRA adapters, images and KV tiers with agents on nodes. All bits are those of a local agent."""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from llm_serving.model.shape import ModelShape
from performance.models.vision import write_vision_model
from support.chat_images import sample_part
from support.cluster import NodeProcess, new_key
from support.lora_folders import random_adapter
from support.server_process import ServerProcess, running_server
from support.time_limits import time_limit

SETTINGS = (
    *("model_config.seq_length=[1024]", "model_config.max_generate_length=1024", "pa_config.decode_seq_length=1024"),
    *("lora_config.max_adapters=2", "lora_config.max_rank=8"),
)
IMAGES = ([1], [2, 3], [])


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + time_limit(timeout_s)
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def answered(server: ServerProcess, numbers: list[int], model: str | None = None) -> tuple[list[int], Any]:
    """Asks about some images. Returns the tokens of the answer and their log-probabilities."""
    content = [*(sample_part(number) for number in numbers), {"type": "text", "text": "t11 t12 t13"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "logprobs": True, "top_logprobs": 2}  # fmt: skip
    answer = server.post("/v1/chat/completions", body | ({} if model is None else {"model": model}))
    assert "choices" in answer, answer
    [choice] = answer["choices"]
    return choice["token_ids"], choice["logprobs"]


def all_answers(server: ServerProcess, *models: str | None) -> list[tuple[list[int], Any]]:
    """Asks about all images with all models, at the same time."""
    jobs = [(numbers, model) for model in models for numbers in IMAGES]
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda job: answered(server, *job), jobs))


def load(server: ServerProcess, name: str, folder: Path) -> None:
    loaded = server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
    assert loaded.get("id") == name, loaded


def unload(server: ServerProcess, name: str) -> None:
    assert server.post("/v1/unload_lora_adapter", {"lora_name": name})["deleted"] is True


@dataclass
class Cluster:
    server: ServerProcess
    folder: Path
    key: Path
    nodes: list[NodeProcess] = field(default_factory=list)

    def new_node(self) -> NodeProcess:
        self.nodes.append(NodeProcess(self.folder / f"node{len(self.nodes)}", self.key))
        return self.nodes[-1]

    def states(self) -> list[str]:
        return [each["state"] for each in self.server.get("/v1/cluster")["replicas"]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "small_vlm"
    write_vision_model(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Path]:
    root, shape = tmp_path_factory.mktemp("adapters"), ModelShape.from_hf_folder(model)
    return {name: random_adapter(root / name, shape, seed=seed) for seed, name in enumerate(("first", "second", "new"))}


@pytest.fixture(scope="module")
def settings(model: Path, adapters: dict[str, Path]) -> list[str]:
    return [*SETTINGS, f"model_config.model_path={model}", f"lora_config.adapters=['first={adapters['first']}']"]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("local"), settings) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> Iterator[Cluster]:
    """Provides a server with two replicas, of which only one has a node at first. The last test exchanges this node."""
    folder = tmp_path_factory.mktemp("cluster")
    key = new_key(folder)
    first = NodeProcess(folder / "first", key)
    remote = [
        *(*settings, "parallel_config.executor=nodes", "parallel_config.data_parallel=2"),
        *(f"parallel_config.cluster_key_file={key}", f"parallel_config.nodes={json.dumps([first.address])}"),
        # So few blocks that the prefix cache evicts them to the host memory of the node.
        *("kv_tier_config.host_blocks=200", "pa_config.num_blocks=31", "pa_config.decode_seq_length=480"),
        # An agent keeps only one encoded tile, so it reads and encodes most tiles again.
        *("image_config.cached_tiles=1", "serving_config.agent_restart_limit=10"),
    ]
    nodes = [first]
    try:
        with running_server(folder / "server", remote) as server:
            made = Cluster(server, folder, key, nodes)
            yield made
            server.wait_until_idle()
    finally:
        for node in nodes:
            node.stop()


def test_a_configured_adapter_and_images_have_the_bits_of_a_local_agent(cluster: Cluster, local: ServerProcess) -> None:
    expected = all_answers(local, None, "first")
    assert len({tuple(tokens) for tokens, _ in expected}) == len(expected), "adapters and images change the text"
    assert all_answers(cluster.server, None, "first") == expected
    for numbers in ([4], [5], [4, 5]):  # other images then use the same places
        assert answered(cluster.server, numbers) == answered(local, numbers)


def test_adapters_are_loaded_and_unloaded_while_the_node_serves(
    cluster: Cluster, local: ServerProcess, adapters: dict[str, Path]
) -> None:
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(all_answers, cluster.server, None, "first") for _ in range(2)]
        load(cluster.server, "second", adapters["second"])
        served = [each.result() for each in others]
    assert served == [all_answers(local, None, "first")] * 2
    load(local, "second", adapters["second"])
    assert all_answers(cluster.server, "second", "first") == all_answers(local, "second", "first")
    for server in (cluster.server, local):
        unload(server, "second")
        load(server, "new", adapters["new"])
    assert cluster.server.post("/v1/completions", {"prompt": "a", "model": "second"})["status"] == 404
    assert all_answers(cluster.server, "new") == all_answers(local, "new")
    for server in (cluster.server, local):
        unload(server, "new")


def test_blocks_come_back_from_the_host_memory_of_the_node(cluster: Cluster, local: ServerProcess) -> None:
    def num_hits() -> float:
        name = 'llm_serving_kv_tier_hit_blocks_total{tier="host"}'
        lines = cluster.server.get_text("/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    expected, before = [answered(local, numbers) for numbers in IMAGES], num_hits()
    for _ in range(2):
        assert [answered(cluster.server, numbers) for numbers in IMAGES] == expected
    assert num_hits() > before
    assert cluster.server.post("/v1/completions", {"prompt": "t11", "max_tokens": 1, "session_id": "trip"})["choices"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        cluster.server.get("/v1/sessions/trip")
    with refused.value:
        assert "are in the memory of nodes" in json.loads(refused.value.read())["error"]["message"]


def test_a_replaced_agent_and_a_node_that_joins_later_have_adapters_and_images(
    cluster: Cluster, local: ServerProcess, adapters: dict[str, Path]
) -> None:
    [first] = cluster.nodes
    [agent] = first.agents()
    for server in (cluster.server, local):
        load(server, "new", adapters["new"])
    agent.kill()
    wait_for(lambda: cluster.server.events("agent_lost"))
    wait_for(lambda: "ready" in cluster.states())
    expected = all_answers(local, None, "first", "new")
    assert all_answers(cluster.server, None, "first", "new") == expected
    joined = cluster.new_node()
    cluster.server.post("/v1/cluster/add", {"address": joined.address})
    wait_for(lambda: cluster.states() == ["ready", "ready"])
    cluster.server.post("/v1/cluster/drain", {"node": first.address})
    wait_for(lambda: cluster.states().count("ready") == 1)
    assert all_answers(cluster.server, None, "first", "new") == expected
