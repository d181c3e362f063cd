"""Asks servers with a small model that reads images, with and without LoRA adapters."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.chat_images import sample_part
from support.server_process import ServerProcess
from support.time_limits import time_limit

SETTINGS = (
    *("model_config.seq_length=[1024]", "model_config.max_generate_length=1024", "pa_config.decode_seq_length=1024"),
    *("lora_config.max_adapters=2", "lora_config.max_rank=8"),
)
IMAGES = ([1], [2, 3], [])
HIT_BLOCKS = "llm_serving_kv_tier_hit_blocks_total"
WRITTEN_BLOCKS = "llm_serving_kv_tier_ssd_written_blocks_total"


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


def prompt_of(number: int, length: int = 200) -> list[int]:
    """Returns a prompt of tokens. Different numbers give prompts without a common beginning."""
    return [100 + (number * 31 + place * 7) % 200 for place in range(length)]


def completed(server: ServerProcess, prompt: list[int], session_id: str | None = None) -> dict[str, Any]:
    """Completes a prompt. Returns the response."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
            "logprobs": 2}  # fmt: skip
    session = {} if session_id is None else {"session_id": session_id}
    answer: dict[str, Any] = server.post("/v1/completions", body | session)
    assert "choices" in answer, answer
    return answer


def sum_of_metric(server: ServerProcess, start: str) -> float:
    """Returns the sum of the samples whose lines in ``/metrics`` begin with ``start``."""
    lines = server.get_text("/metrics").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(start))


def load(server: ServerProcess, name: str, folder: Path) -> None:
    loaded = server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
    assert loaded.get("id") == name, loaded


def unload(server: ServerProcess, name: str) -> None:
    assert server.post("/v1/unload_lora_adapter", {"lora_name": name})["deleted"] is True
