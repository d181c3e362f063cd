"""Tests that responses are the same on a device that launches steps ahead and draws wrong tokens.

The device is artificial: a thread on the CPU, which draws wrong tokens in every third launch of draws.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from support.completions_client import assert_same, run_together
from support.server_process import ServerProcess, running_server

NATIVE = ["model_config.op_table=native", "model_config.model_dtype=bfloat16", "speculative_config.method=off"]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.2, "top_k": 64, "min_p": 0.02, "logprobs": 1},
    {"temperature": 0.7, "top_k": 0, "top_p": 0.9},
]
WAITING: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_k": 100},
    {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2},
]
"""Sequences whose tokens only the host can choose. They are short, so that most steps do not have them."""


def bodies() -> list[dict[str, Any]]:
    """Returns greedy requests and requests with a temperature."""
    common = {"logprobs": 0, "return_token_ids": True, "ignore_eos": True}
    kinds = [*(kind | {"max_tokens": 24} for kind in 4 * KINDS), *(kind | {"max_tokens": 3} for kind in WAITING)]
    return [
        common | kind | {"seed": index, "prompt": [1, *range(300, 302 + 5 * (index % 4)), 500 + index]}
        for index, kind in enumerate(kinds)
    ]


def test_wrong_draws_of_a_device_change_no_response(shallow_model: Path, tmp_path: Path) -> None:
    settings = [*NATIVE, f"model_config.model_path={shallow_model}"]
    with running_server(tmp_path / "plain", settings) as server:
        expected = asyncio.run(run_together(server.url, bodies(), seed=4, leave=0))
        assert server.counter("device_draws") == 0
    (tmp_path / "ahead").mkdir()
    server = ServerProcess(tmp_path / "ahead", settings, faulty=["draws", str(tmp_path / "none")])
    try:
        server.wait_ready()
        answers = asyncio.run(run_together(server.url, bodies(), seed=3, leave=0))
        counters = {name: server.counter(name) for name in ("device_draws", "wrong_device_draws", "second_launches")}
        [ready] = server.events("agent_ready")
        server.wait_until_idle()
    finally:
        server.stop()
    for body, wanted, answer in zip(bodies(), expected, answers, strict=True):
        assert wanted is not None
        assert answer is not None
        assert_same(answer, wanted, body)
    assert ready["summary"]["steps_ahead"] == "on"
    assert counters["device_draws"] > counters["wrong_device_draws"] > 0, counters
    assert counters["second_launches"] > 0
