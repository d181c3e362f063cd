"""Agents that share a model add each its part of a LoRA adapter.

The oracle is one agent whose weights have the adapter merged in: weight + scale x B x A.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llm_serving.model.shape import ModelShape
from performance.models.folders import write_model
from performance.models.variants import FAMILY_VARIANTS
from support.adapted_models import ADAPTER, ADAPTERS, merge
from support.agent_group import Setup, run_group
from support.lora_folders import random_adapter
from support.sweeps import with_sweeps

WORKER = "../lora/adapted_group_worker.py"
TESTED = (("phi3", 2, 1), ("qwen3_tied", 2, 1))
SWEPT = (
    *((model, 2, 1) for model in ("llama_linear_mqa", "qwen2_tied", "gemma3", "gpt_oss", "mixtral", "deepseek_v2")),
    *(("phi3", 1, 2), ("qwen3_tied", 2, 2), ("deepseek_v2_lite", 1, 2)),
)
"""Models with their numbers of ``tensor_parallel`` and ``pipeline_parallel``."""
CASES = with_sweeps([*TESTED, *SWEPT], lambda *case: case in SWEPT)
pytestmark = pytest.mark.timeout(300)

Run = Callable[[str, Setup, bool], dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns a function that runs a seeded model in a group. Returns the output of the agent that samples."""
    scratch, known = tmp_path_factory.mktemp("adapted-groups"), dict[tuple[str, str, bool], dict[str, Any]]()

    def run(model: str, setup: Setup, merged: bool) -> dict[str, Any]:
        folder = scratch / f"{model}-{merged}"
        if not folder.exists():
            write_model(replace(FAMILY_VARIANTS[model], dtype="float32", num_shards=1), folder)
            random_adapter(folder / ADAPTER, ModelShape.from_path(folder), seed=5)
            if merged:
                merge(folder, folder / ADAPTER)
        if (model, str(setup), merged) not in known:
            sampler = (setup.pipeline_parallel - 1) * setup.tensor_parallel
            known[model, str(setup), merged] = run_group(setup, {model: folder}, WORKER)[sampler][model]
        return known[model, str(setup), merged]

    return run


@pytest.mark.parametrize(("model", "tensor_parallel", "pipeline_parallel"), CASES)
def test_tokens_are_those_of_merged_weights_alone_and_in_a_batch(
    run: Run, model: str, tensor_parallel: int, pipeline_parallel: int
) -> None:
    group = run(model, Setup(tensor_parallel, pipeline_parallel, extra=ADAPTERS), False)
    merged = run(model, Setup(), True)["plain"]
    assert group["adapted"]["tokens"] == merged["tokens"]
    np.testing.assert_allclose(group["adapted"]["logits"], merged["logits"], atol=2e-4, rtol=2e-4)
    assert group["adapted"]["tokens"] != group["unadapted"]["tokens"], "an adapter without an effect tests nothing"
    assert group["mixed adapted"] == group["adapted"]
    assert group["mixed unadapted"] == group["unadapted"]
