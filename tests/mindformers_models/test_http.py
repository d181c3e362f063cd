"""Tests MindFormers' models through ``start_server.py``.

Tokens never depend on the batch. The tokens of Qwen3 equal those of this project's model.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from performance.models.folders import write_model
from support.completions_client import assert_same, run_alone, run_together
from support.mindformers_variants import VARIANTS, needs_mindformers
from support.server_process import running_server

pytestmark = needs_mindformers

MODELS = ("qwen3_tied", "qwen3_moe")
TIE_MARGIN = 0.05
"""Two log-probabilities count as a tie up to this difference. They come from float16 logits with a standard deviation
of about 4.
"""
NUM_TOKENS = 64
PRESSED = [
    "model_config.max_generate_length=192",
    "pa_config.num_blocks=30",
    "scheduler_config.max_num_batched_tokens=64",
    "scheduler_config.prefix_cache=True",
    "scheduler_config.decode_steps_ahead=2",
]
"""Settings with few blocks, chunked prompts and a prefix cache."""


def bodies() -> list[dict[str, Any]]:
    """Returns bodies of greedy and sampled requests.

    Lengths are close to the block size. Some prompts have a common beginning.
    """
    common = [(11 * i + 3) % 400 for i in range(40)]
    prompts = [[(7 * i * n + n) % 419 for i in range(n)] for n in (1, 2, 15, 16, 17, 50, 90)]
    prompts += [[*common, n] for n in range(5)]
    asked = []
    for index, prompt in enumerate(prompts * 2):
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0.0, "logprobs": 3}
        if index >= len(prompts):
            body |= {"temperature": 0.9, "seed": index, "top_p": 0.95}
        asked.append({**body, "ignore_eos": True, "return_token_ids": True})
    return asked


def serve(folder: Path, *overrides: str) -> list[str]:
    return [f"model_config.model_path={folder}", "model_config.model_dtype=float16", *overrides]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / request.param
    write_model(VARIANTS[request.param], folder)
    return folder


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the server that ``alone`` starts. It contains the server's logs."""
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def alone(model: Path, folder: Path) -> Any:
    """Returns the responses of MindFormers' model to all requests, each of which runs alone."""
    overrides = serve(model, "model_config.model_type=mindformers")
    with running_server(folder, overrides, forks=False) as server:
        assert server.get("/server_info")["model"]["op_table"] == "native"
        return asyncio.run(run_alone(server.url, bodies()))


@pytest.mark.parametrize("model", ["qwen3_tied"], indirect=True)
def test_tokens_equal_those_of_this_project(model: Path, alone: Any, tmp_path: Path) -> None:
    """Greedy tokens equal those of this project's model up to the first tie of log-probabilities.

    After a tie, the texts may differ. With experts, texts may differ without a tie, because a rounding can send a token
    to another expert. test_tokens.py tests models with experts.
    """
    with running_server(tmp_path, serve(model, "model_config.op_table=native"), forks=False) as server:
        ours = asyncio.run(run_alone(server.url, bodies()))
    compared, ties = 0, 0
    for body, own, theirs in zip(bodies(), ours, alone, strict=True):
        if body["temperature"] == 0.0:
            same = next((i for i in range(NUM_TOKENS) if own[1][i] != theirs[1][i]), NUM_TOKENS)
            compared += same
            if same < NUM_TOKENS:
                ties += 1
                best, second = sorted(own[3][same].values(), reverse=True)[:2]
                assert best - second < TIE_MARGIN, f"prompt of {len(body['prompt'])}, token {same}"
    print(f"{compared} greedy tokens equal, {ties} texts part at a tie")
    assert compared >= 600


@pytest.mark.parametrize("policy", ["prefill_first", "chunked"])
def test_an_answer_does_not_depend_on_the_batch(model: Path, alone: Any, tmp_path: Path, policy: str) -> None:
    overrides = serve(model, "model_config.model_type=mindformers", f"scheduler_config.policy={policy}", *PRESSED)
    with running_server(tmp_path, overrides, forks=False) as server:
        together = asyncio.run(run_together(server.url, bodies(), seed=3, leave=0.0))
        engine = server.wait_until_idle()
    for answer, expected, body in zip(together, alone, bodies(), strict=True):
        assert answer is not None
        assert_same(answer, expected, body)
    assert engine["preemptions"] > 0, "the pool was meant to be too small"


def test_the_logs_of_mindformers_are_next_to_the_agent_logs(alone: Any, folder: Path) -> None:
    assert (folder / "mindformers" / "rank_0" / "error.log").read_text() == ""
    assert "| Source" not in (folder / "agent_0.log").read_text()
