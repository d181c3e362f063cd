"""Tests that ``parallel_config.sum_parts`` makes one agent give the same bits as a group of agents that share the
layers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from performance.models.folders import write_model
from performance.models.variants import FAMILY_VARIANTS, VARIANTS
from support.agent_group import Setup, run_group, with_layers
from support.sweeps import with_sweeps

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("gqa_tied", "llama_yarn_bias")
"""Models with uneven heads, and with a bias of the attention output."""
SWEPT_MODELS = ("mha", "qwen2_tied", "qwen3_tied", "tiny_llama")
"""These run in ``make test-sweeps`` only, because the other cases test the same code."""
STAGED, STAGED_MODELS = "float32, 2 stages", MODELS[:1]
"""The setup with stages, and its model in ``make test``. The setup ``int8`` runs all ``MODELS``."""
SETUPS = {
    "bfloat16": Setup(2, 1, "bfloat16", "fused"),
    STAGED: Setup(2, 2, "float32", "fused"),
    "int8": Setup(2, 1, "bfloat16", "fused", "int8", "int8"),
    "int4": Setup(2, 1, "bfloat16", "fused", "int4", "int8"),
    "int4_weight_only": Setup(2, 1, "bfloat16", "fused", "int4_weight_only"),
}
SWEPT_SETUPS = ("bfloat16", "int4_weight_only")
"""These run in ``make test-sweeps`` only, because the other formats include floats and groups of weights."""
INDIVISIBLE_INT4 = ("qwen2_tied",)
COMPARED = ("free", "forced", "invariance")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    scratch, seeded = tmp_path_factory.mktemp("sum-parts"), {**VARIANTS, **FAMILY_VARIANTS}
    names = [name for name in (*MODELS, *SWEPT_MODELS) if name in seeded]
    for name in names:
        write_model(with_layers(seeded[name], 2), scratch / name)
    return {"tiny_llama": ROOT / "models" / "tiny_llama", **{name: scratch / name for name in names}}


def answers(setup: Setup, folders: dict[str, Path]) -> dict[str, Any]:
    """Returns the output of the agent that samples, for each model."""
    return run_group(setup, folders, ways=COMPARED)[(setup.pipeline_parallel - 1) * setup.tensor_parallel]


@pytest.mark.parametrize(
    ("name", "models"),
    with_sweeps(
        [
            (STAGED, STAGED_MODELS),
            (STAGED, MODELS[1:]),
            *((name, MODELS) for name in SETUPS if name != STAGED),
            *((name, SWEPT_MODELS) for name in SETUPS),
        ],
        lambda name, models: name in SWEPT_SETUPS or models not in (MODELS, STAGED_MODELS),
    ),
)
def test_an_agent_that_sums_in_parts_gives_the_bits_of_a_group(
    name: str, models: tuple[str, ...], folders: dict[str, Path]
) -> None:
    shared = SETUPS[name]
    alone = replace(shared, tensor_parallel=1, extra={"parallel_config.sum_parts": 2})
    divisible = [model for model in models if not name.startswith("int4") or model not in INDIVISIBLE_INT4]
    chosen = {model: folders[model] for model in divisible}
    wanted, found = answers(shared, chosen), answers(alone, chosen)
    for model in chosen:
        # Compares tokens of free generation, tokens chosen after the oracle's tokens, and digests of the same
        # positions.
        for way in COMPARED:
            assert found[model][way] == wanted[model][way], (model, way)


def test_without_sum_parts_the_bits_differ(folders: dict[str, Path]) -> None:
    """Without ``sum_parts``, one agent and a group give different bits. Otherwise the test above would prove nothing.

    This test uses float32. In bfloat16, most sums of this small model are the same for every order of addition.
    """
    models = {name: folders[name] for name in MODELS[:1]}
    shared = Setup(2, 1, "float32", "fused")
    wanted, found = answers(shared, models), answers(replace(shared, tensor_parallel=1), models)
    assert all(found[model]["invariance"] != wanted[model]["invariance"] for model in models)
