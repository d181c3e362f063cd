"""Serves a small model with linear attention: the bits do not depend on batches, chunks, preemptions, drafts or the
prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import llm_serving
from llm_serving.model.shape import ModelShape
from performance.models.folders import write_model
from performance.models.variants import FAMILY_VARIANTS
from support.lora_folders import random_adapter

PROMPTS = [[5 + (7 * i + 3 * j) % 400 for j in range(3 + 11 * i % 60)] for i in range(10)]
GREEDY = {"max_tokens": 50, "temperature": 0, "ignore_eos": True, "logprobs": 2}
SAMPLED = {"max_tokens": 20, "temperature": 1.0, "seed": 3, "n": 2, "ignore_eos": True}
THREE_TOKENS = {"temperature": 1.0, "seed": 7, "logit_bias": {"20": 100, "21": 100, "22": 100}}
"""Sampling parameters that allow only three tokens. The text then repeats itself, which gives right and wrong drafts.
"""
SCORED = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 2}


@contextmanager
def served(folder: Path, **settings: dict[str, Any]) -> Iterator[llm_serving.LLM]:
    """Serves the model. By default, the settings ask for the prefix cache, for swapping and for drafts."""
    asked = {"prefix_cache": True, "preemption": "swap", **settings.pop("scheduler_config", {})}
    sizes = {"max_generate_length": 160, **settings.pop("model_config", {})}
    drafts = {"method": "suffix", **settings.pop("speculative_config", {})}
    with llm_serving.LLM(
        str(folder), config="llama_tiny_cpu.yaml", dtype="bfloat16", model_config=sizes, scheduler_config=asked,
        speculative_config=drafts, **settings,
    ) as llm:  # fmt: skip
        yield llm


def answers(llm: llm_serving.LLM, *, drafted: bool = False) -> list[list[Any]]:
    """Returns the texts and their log-probabilities. The numbers of cached tokens may differ, so they are left out.

    With ``drafted``, returns only the last texts, which have many drafts.
    """
    outputs = [] if drafted else [llm.generate(PROMPTS, GREEDY), llm.generate(PROMPTS[:3], SAMPLED)]
    outputs += [llm.generate(PROMPTS[3:9], {**GREEDY, **THREE_TOKENS}), llm.generate(PROMPTS[9:10], SCORED)]
    return [[each.choices for each in some] for some in outputs]


def counted(llm: llm_serving.LLM, name: str) -> float:
    """Returns the value of a counter, from the metrics."""
    metrics = llm._host.app.state.metrics
    samples = [each for family in metrics.registry.collect() for each in family.samples]
    return sum(each.value for each in samples if each.name == f"llm_serving_{name}_total")


def chat(llm: llm_serving.LLM) -> tuple[list[Any], list[int]]:
    """Returns the answers of a chat, and how many tokens of each prompt were in the prefix cache.

    Each prompt has the tokens of the prompt and answer before, and a new message. A last prompt shares the beginning.
    """
    replies, prompt = [], [5 + 7 * i % 400 for i in range(37)]
    for turn in range(3):
        reply = llm.generate([prompt], {**GREEDY, "max_tokens": 21})[0]
        replies.append(reply)
        prompt = [*prompt, *reply.token_ids, *(40 + turn + i for i in range(9))]
    replies.append(llm.generate([[*prompt[:35], 9, 9]], {**GREEDY, "max_tokens": 5})[0])
    found = [each.usage["prompt_tokens_details"]["cached_tokens"] for each in replies]
    return [each.choices for each in replies], found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / "qwen3_next"
    write_model(FAMILY_VARIANTS["qwen3_next"], path)
    return path


@pytest.mark.sweep
def test_drafts_of_a_draft_model_give_the_same_bits(folder: Path, tmp_path: Path) -> None:
    """The draft model has other random weights, so most of its drafts are wrong."""
    write_model(FAMILY_VARIANTS["llama_dynamic"], tmp_path / "draft")
    drafts = {"method": "draft", "model": str(tmp_path / "draft"), "always": True}
    with served(folder, speculative_config={"method": "off"}) as llm:
        plain = answers(llm)
    with served(folder, speculative_config=drafts, scheduler_config={"policy": "slo"}) as llm:
        assert answers(llm) == plain
        assert counted(llm, "accepted_draft_tokens") < counted(llm, "draft_tokens")
        assert counted(llm, "draft_model_seconds") > 0


@pytest.mark.usefixtures("forked_llm_agents")
def test_batches_chunks_preemptions_and_stages_give_the_same_bits(folder: Path) -> None:
    """The first stage has only layers with linear attention. Only a part of the prompts runs through stages here."""
    with served(
        folder, pa_config={"num_blocks": 256}, model_config={"decode_batch_size": [1]},
        scheduler_config={"state_snapshots": 0}, speculative_config={"method": "off"},
    ) as llm:  # fmt: skip
        config = llm._host.config
        alone, (whole, cached) = answers(llm), chat(llm)
        assert counted(llm, "preemptions") == counted(llm, "draft_tokens") == 0
        assert cached == [0, 0, 0, 0]
    assert "Qwen3NextForCausalLM has no prefix cache, because scheduler_config.state_snapshots is 0" in config.notes[0]
    assert "the states of Qwen3NextForCausalLM are not swapped; recompute is used" in config.notes[1]
    with served(
        folder, pa_config={"num_blocks": 30}, model_config={"decode_batch_size": [16]},
        scheduler_config={"policy": "chunked", "chunk_tokens": 24}, serving_config={"row_check_interval": 2},
    ) as llm:  # fmt: skip
        (resumed, cached), pressed = chat(llm), answers(llm)
        assert counted(llm, "preemptions") > 0, "the cache is too small for all sequences"
        # The scored prompt has 40 tokens, all of which are right drafts.
        assert 40 + 20 < counted(llm, "accepted_draft_tokens") < counted(llm, "draft_tokens") - 20
    assert resumed == whole
    assert cached == [0, 48, 80, 32], "each prompt resumes at the last full block that was computed before it"
    assert pressed == alone
    with served(folder, model_config={"decode_batch_size": [1]}) as llm:
        assert answers(llm, drafted=True) == alone[2:], "a step of one sequence has drafts"
        assert 40 + 20 < counted(llm, "accepted_draft_tokens") < counted(llm, "draft_tokens") - 20
    with served(
        folder, pa_config={"num_blocks": 20}, parallel_config={"pipeline_parallel": 2},
        scheduler_config={"policy": "chunked", "chunk_tokens": 24}, speculative_config={"method": "off"},
    ) as llm:  # fmt: skip
        assert chat(llm) == (whole, [0, 48, 80, 32])
        assert [each.choices for each in llm.generate(PROMPTS[:6], GREEDY)] == alone[0][:6]
        assert counted(llm, "preemptions") > 0


@pytest.mark.sweep
def test_stages_of_a_pipeline_with_an_adapter_give_the_same_bits(folder: Path, tmp_path: Path) -> None:
    """``tests/agent/test_groups.py`` compares two stages with transformers, and ``tests/lora/test_adapted_groups.py``
    with merged weights. Here they also resume from snapshots, and half of the requests have the adapter.

    The first stage has only layers with linear attention.
    """
    adapter = random_adapter(tmp_path / "adapter", ModelShape.from_path(folder), seed=5)
    settings: dict[str, dict[str, Any]] = {
        "lora_config": {"max_adapters": 1, "max_rank": 8, "adapters": [f"one={adapter}"]},
        "speculative_config": {"method": "off"},
    }
    mixed = [{**GREEDY, "model": "one"} if index % 2 else GREEDY for index in range(len(PROMPTS))]
    with served(folder, **settings) as llm:
        plain, (whole, cached) = answers(llm), chat(llm)
        adapted = [each.choices for each in llm.generate(PROMPTS, mixed)]
    assert all((adapted[index] == plain[0][index]) == (index % 2 == 0) for index in range(len(PROMPTS)))
    with served(
        folder, parallel_config={"pipeline_parallel": 2}, serving_config={"row_check_interval": 2},
        pa_config={"num_blocks": 30}, scheduler_config={"policy": "chunked", "chunk_tokens": 24}, **settings,
    ) as llm:  # fmt: skip
        (resumed, found), pressed = chat(llm), answers(llm)
        preemptions = counted(llm, "preemptions")
        assert preemptions > 0
        assert [each.choices for each in llm.generate(PROMPTS, mixed)] == adapted
        assert counted(llm, "preemptions") > preemptions
    assert (resumed, found) == (whole, cached)
    assert found[1:] == [48, 80, 32]
    assert pressed == plain
