"""Tests shadow serving with real agents. A candidate with the same weights agrees in every token and every bit."""

from __future__ import annotations

import time

from support.server_process import ServerProcess, running_server
from support.time_limits import time_limit

SETTINGS = [
    "models_config.models=[{name: next, config: llama_tiny_cpu.yaml, pinned: true, "
    "set: ['model_config.decode_batch_size=[8]', pa_config.num_blocks=160, serving_config.canary_interval_s=0]}]",
    "shadow_config.model=next",
    "shadow_config.share=1.0",
    "shadow_config.min_answers=2",
    "shadow_config.max_perplexity_change=0.0",
    "shadow_config.max_latency_ratio=1000",
]


def wait_for_answers(server: ServerProcess, number: int) -> dict:
    deadline = time.monotonic() + time_limit(30.0)
    while (shadow := server.get("/v1/shadow"))["answers"].get("compared", 0) < number:
        assert time.monotonic() < deadline, shadow
        time.sleep(0.05)
    return shadow


def test_the_same_weights_agree_and_are_recommended(tmp_path):
    with running_server(tmp_path, SETTINGS) as server:
        deadline = time.monotonic() + time_limit(60.0)
        while server.get("/v1/models")["data"][1]["state"] != "ready":
            assert time.monotonic() < deadline, server.get("/v1/models")
            time.sleep(0.05)
        greedy = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "logprobs": 1}
        first = server.post("/v1/completions", greedy)
        wait_for_answers(server, 1)
        server.post("/v1/completions", {**greedy, "temperature": 1.5, "seed": 3, "stream": False})
        shadow = wait_for_answers(server, 2)
        comparison = shadow["comparison"]
        assert shadow["recommendation"] == "promote", shadow
        assert (comparison["agreement"], comparison["max_logprob_difference"]) == (1.0, 0.0)
        assert comparison["perplexity"]["change"] == 0.0
        assert comparison["tokens"] > 24
        assert server.post("/v1/completions", greedy)["choices"] == first["choices"]
        assert server.events("shadow_recommendation")[0]["recommendation"] == "promote"
        assert 'llm_serving_shadow_recommendation{recommendation="promote"} 1.0' in server.get_text("/metrics")
        assert server.post("/v1/shadow/reset", {})["comparison"]["answers"] == 0
