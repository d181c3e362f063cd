"""Serves a small model with linear attention: the bits do not depend on batches, chunks or preemptions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import llm_serving
from performance.models.folders import write_model
from performance.models.variants import FAMILY_VARIANTS

PROMPTS = [[5 + (7 * i + 3 * j) % 400 for j in range(3 + 11 * i % 60)] for i in range(14)]
GREEDY = {"max_tokens": 50, "temperature": 0, "ignore_eos": True, "logprobs": 2}
SAMPLED = {"max_tokens": 20, "temperature": 1.0, "seed": 3, "n": 2, "ignore_eos": True}
SCORED = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 2}


@contextmanager
def served(folder: Path, **settings: dict[str, Any]) -> Iterator[llm_serving.LLM]:
    """Serves the model with settings that ask for everything that its states do not permit."""
    asked = {"prefix_cache": True, "preemption": "swap", **settings.pop("scheduler_config", {})}
    sizes = {"max_generate_length": 160, **settings.pop("model_config", {})}
    with llm_serving.LLM(
        str(folder), config="llama_tiny_cpu.yaml", dtype="bfloat16", model_config=sizes, scheduler_config=asked,
        speculative_config={"method": "suffix"}, **settings,
    ) as llm:  # fmt: skip
        yield llm


def answers(llm: llm_serving.LLM) -> list[list[Any]]:
    return [llm.generate(PROMPTS, GREEDY), llm.generate(PROMPTS[:3], SAMPLED), llm.generate(PROMPTS[9:10], SCORED)]


def num_preemptions(llm: llm_serving.LLM) -> float:
    """Returns the number of preemptions so far, from the metrics."""
    metrics = llm._host.app.state.metrics
    samples = [each for family in metrics.registry.collect() for each in family.samples]
    return sum(each.value for each in samples if each.name == "llm_serving_preemptions_total")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / "qwen3_next"
    write_model(FAMILY_VARIANTS["qwen3_next"], path)
    return path


@pytest.mark.usefixtures("forked_llm_agents")
def test_batches_chunks_and_preemptions_give_the_same_bits(folder: Path) -> None:
    with served(folder, pa_config={"num_blocks": 256}, model_config={"decode_batch_size": [1]}) as llm:
        config = llm._host.config
        alone = answers(llm)
        assert num_preemptions(llm) == 0
    assert config.notes[0].startswith("Qwen3NextForCausalLM has no prefix cache and no speculation")
    assert "the states of Qwen3NextForCausalLM are not swapped; recompute is used" in config.notes[1]
    with served(
        folder, pa_config={"num_blocks": 30}, model_config={"decode_batch_size": [16]},
        scheduler_config={"policy": "chunked", "chunk_tokens": 24},
    ) as llm:  # fmt: skip
        pressed = answers(llm)
        assert num_preemptions(llm) > 0, "the cache is too small for all sequences"
    assert pressed == alone
