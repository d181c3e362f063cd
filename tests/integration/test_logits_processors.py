"""Tests real servers with the operator's logits processors. The processors see all tokens of a sequence, in every
batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.server_process import ServerProcess, running_server

MODULE = '''
import numpy as np

class Rule:
    """Allows two tokens, which all earlier tokens determine. Fails if the prompt begins with token 9."""

    def __init__(self, vocab_size):
        assert vocab_size > 1000

    def __call__(self, prompt, output, logits):
        if prompt[0] == 9:
            raise ValueError("nine")
        first = 300 + (7 * int(prompt.sum()) + 31 * len(output) + int(output.sum())) % 500
        kept = logits[first : first + 2].copy()
        logits[:] = -np.inf
        logits[first : first + 2] = kept

class Higher:
    """Raises the second of the two tokens that are left."""

    def __init__(self, vocab_size):
        pass

    def __call__(self, prompt, output, logits):
        logits[np.flatnonzero(logits > -np.inf)[1]] += 50
'''
PROCESSORS = "model_config.logits_processors=[operator_rules:Rule, operator_rules:Higher]"
SERVERS = {
    "two agents": ["parallel_config.tensor_parallel=2", "model_config.model_dtype=bfloat16"],
    "native, few blocks": [
        *("model_config.op_table=native", "model_config.model_dtype=bfloat16"),
        *("model_config.max_generate_length=256", "model_config.seq_length=[256]", "pa_config.decode_seq_length=256"),
        *("pa_config.num_blocks=24", "scheduler_config.policy=chunked", "scheduler_config.max_num_batched_tokens=24"),
    ],
}


@pytest.fixture(scope="module", params=SERVERS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shallow_model: Path
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "operator_rules.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        settings = [f"model_config.model_path={shallow_model}", *SERVERS[request.param], PROCESSORS]
        with running_server(folder, settings) as server:
            yield server


def expected(prompt: list[int], length: int) -> list[int]:
    """Returns the output that the processors force. Each token depends on the prompt and on all output tokens before
    it.
    """
    output: list[int] = []
    for _ in range(length):
        output.append(301 + (7 * sum(prompt) + 31 * len(output) + sum(output)) % 500)
    return output


def choice(server: ServerProcess, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post("/v1/completions", {"ignore_eos": True, "return_token_ids": True, **body})
    assert "choices" in answer, answer
    found: dict[str, Any] = answer["choices"][0]
    return found


def test_processors_see_all_tokens_of_each_sequence_in_every_batch(server: ServerProcess) -> None:
    bodies = [
        {
            "prompt": [20 + seed, *range(300, 300 + 9 * (seed % 4))],
            "max_tokens": 60,
            "temperature": seed % 3 * 0.5,
            "seed": seed,
            **({"repetition_penalty": 1.2} if seed % 5 == 0 else {}),
            **({"logit_bias": {"400": -3}} if seed % 5 == 1 else {}),
        }
        for seed in range(12)
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: choice(server, body), bodies))
    for body, answer in zip(bodies, answers, strict=True):
        assert answer["token_ids"] == expected(body["prompt"], 60)


def test_log_probabilities_stay_those_of_the_model(server: ServerProcess) -> None:
    body = {"prompt": [1, 310, 311], "max_tokens": 4, "temperature": 0, "logprobs": 2}
    answer = choice(server, body)
    assert answer["token_ids"] == expected(body["prompt"], 4)
    assert max(answer["logprobs"]["token_logprobs"]) < -0.5
    scored = choice(server, {**body, "prompt": [*body["prompt"], *answer["token_ids"]], "echo": True, "max_tokens": 1})
    assert scored["logprobs"]["token_logprobs"][3:7] == answer["logprobs"]["token_logprobs"]


def test_a_processor_that_fails_ends_its_step_with_its_error_and_the_server_continues(server: ServerProcess) -> None:
    answer = server.post("/v1/completions", {"prompt": [9, 310], "max_tokens": 4})
    assert answer["status"] == 500, answer
    body = {"prompt": [20, 310], "max_tokens": 8}
    assert choice(server, body)["token_ids"] == expected(body["prompt"], 8)
    assert len(server.events("agent_lost")) == 0


def test_a_class_that_does_not_exist_stops_the_start(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="'nowhere:Rule' cannot be made"),
        running_server(tmp_path, ["model_config.logits_processors=[nowhere:Rule]"]),
    ):
        pass
