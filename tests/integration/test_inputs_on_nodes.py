"""Tests LoRA adapters, images, KV tiers and sessions with agents on nodes. All bits are those of a local agent."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llm_serving.model.shape import ModelShape
from performance.models.vision import write_vision_model
from support.cluster import NodeProcess, new_key
from support.image_questions import (
    HIT_BLOCKS,
    IMAGES,
    SETTINGS,
    WRITTEN_BLOCKS,
    all_answers,
    answered,
    completed,
    load,
    prompt_of,
    sum_of_metric,
    unload,
    wait_for,
)
from support.lora_folders import random_adapter
from support.server_process import ServerProcess, running_server
from support.session_files import call, put


@dataclass
class Cluster:
    server: ServerProcess
    folder: Path
    key: Path
    nodes: list[NodeProcess] = field(default_factory=list)

    def new_node(self) -> NodeProcess:
        self.nodes.append(NodeProcess(self.folder / f"node{len(self.nodes)}", self.key))
        return self.nodes[-1]

    def state_of(self, node: NodeProcess) -> str:
        return {each["name"]: str(each["state"]) for each in self.server.get("/v1/cluster")["nodes"]}[node.address]

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
    tiers = ["kv_tier_config.host_blocks=200"]
    with running_server(tmp_path_factory.mktemp("local"), [*settings, *tiers]) as server:
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
        *(f"kv_tier_config.ssd_folder={folder / 'tier'}", "kv_tier_config.loads=always"),
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
    hits = f'{HIT_BLOCKS}{{tier="host"}}'
    expected, before = [answered(local, numbers) for numbers in IMAGES], sum_of_metric(cluster.server, hits)
    for _ in range(2):
        assert [answered(cluster.server, numbers) for numbers in IMAGES] == expected
    assert sum_of_metric(cluster.server, hits) > before


def test_a_session_moves_from_a_node_to_another_server_and_back(cluster: Cluster, local: ServerProcess) -> None:
    """The last server of this journey is the first one again, with another session id."""
    tokens, journey, names = prompt_of(1), [cluster.server, local, cluster.server], ["trip", "second", "third"]
    first = completed(cluster.server, tokens, "trip")
    for place, (server, target) in enumerate(itertools.pairwise(journey)):
        status, file = call(server, "GET", f"/v1/sessions/{names[place]}")
        assert status == 200
        session_id = names[place + 1]
        imported = put(target, file, session_id)
        assert imported["differences"] == []
        assert imported["resumed_tokens"] >= imported["tokens"] - 17
        tokens = [*tokens, *first["choices"][0]["token_ids"], *prompt_of(7 + place, 40)]
        resumed = completed(target, tokens, session_id)
        assert resumed["usage"]["prompt_tokens_details"]["cached_tokens"] >= imported["resumed_tokens"]
        assert resumed["choices"] == completed(server, tokens)["choices"], "tokens and bits of log-probabilities"
        first = resumed
    damaged = bytearray(file)
    damaged[len(file) // 2] ^= 1
    for body, reason in ((bytes(damaged), "damaged"), (file[:-30], "cut off")):
        status, refused = call(cluster.server, "PUT", "/v1/sessions/bad", body)
        assert (status, reason in json.loads(refused)["error"]["message"]) == (400, True), refused


def test_a_replaced_agent_and_a_node_that_joins_later_have_adapters_and_images(
    cluster: Cluster, local: ServerProcess, adapters: dict[str, Path]
) -> None:
    [first] = cluster.nodes
    [agent] = first.agents()
    written = sum_of_metric(cluster.server, WRITTEN_BLOCKS)
    completion = completed(cluster.server, prompt_of(9), "file")["choices"]
    wait_for(lambda: sum_of_metric(cluster.server, WRITTEN_BLOCKS) >= written + 12)
    _, file = call(cluster.server, "GET", "/v1/sessions/file")
    for server in (cluster.server, local):
        load(server, "new", adapters["new"])
    agent.kill()
    wait_for(lambda: cluster.server.events("agent_lost"))
    wait_for(lambda: "ready" in cluster.states())
    expected = all_answers(local, None, "first", "new")
    assert put(cluster.server, file)["differences"] == []  # when it has ended, the SSD is in use again
    assert all_answers(cluster.server, None, "first", "new") == expected
    assert completed(cluster.server, prompt_of(9))["choices"] == completion
    assert sum_of_metric(cluster.server, f'{HIT_BLOCKS}{{tier="ssd"}}') > 0, "the host blocks were lost with the agent"
    joined = cluster.new_node()
    cluster.server.post("/v1/cluster/add", {"address": joined.address})
    wait_for(lambda: cluster.states() == ["ready", "ready"])
    cluster.server.post("/v1/cluster/drain", {"node": first.address})
    wait_for(lambda: cluster.states().count("ready") == 1)
    assert all_answers(cluster.server, None, "first", "new") == expected


def test_a_node_that_is_killed_while_it_sends_blocks_leaves_no_wrong_block(
    cluster: Cluster, local: ServerProcess
) -> None:
    """The server writes the blocks of new prompts to its SSD when the node is killed. Other agents then use the SSD."""
    server, prompts = cluster.server, [prompt_of(number, 400) for number in range(20, 28)]
    expected = [completed(local, prompt)["choices"] for prompt in prompts]
    [used] = [node for node in cluster.nodes if cluster.state_of(node) == "used"]
    written = sum_of_metric(server, WRITTEN_BLOCKS)
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(completed, server, prompt) for prompt in prompts]
        wait_for(lambda: sum_of_metric(server, WRITTEN_BLOCKS) > written)
        used.send_signal(signal.SIGKILL)
        cluster.server.post("/v1/cluster/add", {"address": cluster.new_node().address})
        assert [each.result()["choices"] for each in asked] == expected
    # If all requests ended before the loss was noticed, new requests would get a 503 until an agent is ready again.
    wait_for(lambda: cluster.state_of(used) != "used" and "ready" in cluster.states())
    assert [completed(server, prompt)["choices"] for prompt in prompts] == expected
    assert sum_of_metric(server, "llm_serving_kv_tier_ssd_rejected_records_total") == 0
