"""Tests LoRA adapters, images, KV tiers and sessions with a model that is divided among two nodes.

All bits are those of the same group of agents on one machine.
"""

from __future__ import annotations

import json
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
    wait_for,
)
from support.lora_folders import random_adapter
from support.server_process import running_server
from support.session_files import call, put


@pytest.mark.timeout(600)
def test_a_model_on_two_nodes_has_the_bits_of_a_local_group(tmp_path: Path) -> None:
    model, key = tmp_path / "small_vlm", new_key(tmp_path)
    write_vision_model(model)
    shape = ModelShape.from_hf_folder(model)
    adapters = {name: random_adapter(tmp_path / name, shape, seed=seed) for seed, name in enumerate(("first", "new"))}
    group = [
        *(*SETTINGS, f"model_config.model_path={model}", "parallel_config.tensor_parallel=2"),
        *(f"lora_config.adapters=['first={adapters['first']}']", "kv_tier_config.host_blocks=200"),
    ]
    nodes = [NodeProcess(tmp_path / f"node{number}", key) for number in range(2)]
    spanning = [
        *(*group, "parallel_config.executor=nodes", "parallel_config.nodes_per_replica=2"),
        *(f"parallel_config.cluster_key_file={key}", f"parallel_config.nodes={json.dumps([n.address for n in nodes])}"),
        # So few blocks that the prefix cache evicts them to the host memory of the nodes.
        *("pa_config.num_blocks=31", "pa_config.decode_seq_length=480", "image_config.cached_tiles=1"),
        *(f"kv_tier_config.ssd_folder={tmp_path / 'tier'}", "kv_tier_config.loads=always"),
        "serving_config.agent_restart_limit=10",
    ]
    try:
        with running_server(tmp_path / "one", group) as local, running_server(tmp_path / "two", spanning) as server:
            for each in (local, server):
                load(each, "new", adapters["new"])
            expected = all_answers(local, None, "first", "new")
            assert len({tuple(tokens) for tokens, _ in expected}) == len(expected), "adapters and images change texts"
            assert all_answers(server, None, "first", "new") == expected
            assert [answered(server, numbers) for numbers in IMAGES] == expected[: len(IMAGES)]
            assert sum_of_metric(server, f'{HIT_BLOCKS}{{tier="host"}}') > 0

            prompt = prompt_of(1)
            first = completed(server, prompt, "trip")["choices"]
            assert completed(local, prompt, "trip")["choices"] == first
            prompt += [*first[0]["token_ids"], *prompt_of(2, 40)]
            second = completed(local, prompt)["choices"]
            for source, target in ((server, local), (local, server)):
                imported = put(target, call(source, "GET", "/v1/sessions/trip")[1], "other")
                assert imported["differences"] == []
                assert imported["resumed_tokens"] >= imported["tokens"] - 17
                resumed = completed(target, prompt, "other")
                assert resumed["usage"]["prompt_tokens_details"]["cached_tokens"] >= imported["resumed_tokens"]
                assert resumed["choices"] == second, "tokens and bits of log-probabilities"

            wait_for(lambda: sum_of_metric(server, WRITTEN_BLOCKS) >= 12)
            _, file = call(server, "GET", "/v1/sessions/trip")
            [agent] = nodes[0].agents()
            agent.kill()
            wait_for(lambda: server.events("agent_lost"))
            wait_for(lambda: [each["state"] for each in server.get("/v1/cluster")["replicas"]] == ["ready"])
            assert put(server, file, "again")["differences"] == []  # when it has ended, the SSD is in use again
            assert all_answers(server, None, "first", "new") == expected
            assert sum_of_metric(server, f'{HIT_BLOCKS}{{tier="ssd"}}') > 0
    finally:
        for node in nodes:
            node.stop()
