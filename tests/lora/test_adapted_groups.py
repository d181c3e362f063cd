"""Tests agents that share a model. Each agent adds its part of a LoRA adapter.

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
PAIR, STAGES = Setup(2, 1, extra=ADAPTERS), Setup(1, 2, extra=ADAPTERS)
NATIVE_PAIR, NATIVE_STAGES = (replace(setup, dtype="float16", op_table="native") for setup in (PAIR, STAGES))
TESTED = (("phi3", PAIR), ("qwen3_tied", PAIR))
SWEPT = (
    *((name, PAIR) for name in ("llama_linear_mqa", "qwen2_tied", "gemma3", "gpt_oss", "mixtral", "deepseek_v2")),
    ("qwen3_next", PAIR),
    ("qwen3_next", STAGES),
    ("qwen3_5", PAIR),
    *(("phi3", STAGES), ("deepseek_v2_lite", STAGES), ("qwen3_tied", Setup(2, 2, extra=ADAPTERS))),
    *(("phi3", NATIVE_PAIR), ("qwen3_tied", NATIVE_PAIR), ("qwen3_tied", NATIVE_STAGES)),
)
"""``make test`` runs native operators with adapters in test_native_adapters.py."""
CASES = with_sweeps([*TESTED, *SWEPT], lambda *case: case in SWEPT)
TOLERANCE = {"float32": 1e-3, "float16": 0.06}
"""Maximum difference of a logit from that of merged weights in float32."""
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


@pytest.mark.parametrize(("model", "setup"), CASES)
def test_tokens_are_those_of_merged_weights_alone_and_in_a_batch(run: Run, model: str, setup: Setup) -> None:
    group, merged = run(model, setup, False), run(model, Setup(), True)["plain"]
    assert group["adapted"]["tokens"] == merged["tokens"]
    bound = TOLERANCE[setup.dtype]
    np.testing.assert_allclose(group["adapted"]["logits"], merged["logits"], atol=bound, rtol=0)
    assert group["adapted"]["tokens"] != group["unadapted"]["tokens"], "an adapter without an effect tests nothing"
    assert group["mixed adapted"] == group["adapted"]
    assert group["mixed unadapted"] == group["unadapted"]
