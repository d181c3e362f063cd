"""Compares the tokens of two agents that divide a mixture of experts with those of transformers.

The agents divide the heads, and either whole experts or the columns of each expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from performance.models.folders import write_model
from performance.models.variants import FAMILY_VARIANTS
from support.agent_group import Setup, run_group
from support.golden_files import golden_of
from support.oracle_ties import check_forced
from support.position_bits import check_position_bits

pytestmark = pytest.mark.timeout(300)
WHOLE_EXPERTS = Setup(2, 1, extra={"parallel_config.expert_parallel": True})
COLUMNS = Setup(2, 1)
NATIVE = Setup(2, 1, "float16", "native", extra={"parallel_config.expert_parallel": True})
"""Each agent has whole experts, and native operators compute them."""
CASES = (
    (WHOLE_EXPERTS, "deepseek_v3"),
    (WHOLE_EXPERTS, "deepseek_v2"),
    (WHOLE_EXPERTS, "qwen3_moe"),
    (COLUMNS, "deepseek_v3"),
    (COLUMNS, "deepseek_v2_lite"),
    (WHOLE_EXPERTS, "gpt_oss"),
    (COLUMNS, "gpt_oss"),
)
NATIVE_COLUMNS = Setup(2, 1, "float16", "native")
NATIVE_CASES = (
    (NATIVE, "deepseek_v2"),
    (NATIVE, "gpt_oss"),
    (NATIVE, "deepseek_v2_lite"),
    (NATIVE, "qwen3_moe"),
    (NATIVE_COLUMNS, "gpt_oss"),
)
SWEPT_CASES = (
    *((COLUMNS, "deepseek_v2_lite"), (WHOLE_EXPERTS, "deepseek_v2"), (WHOLE_EXPERTS, "qwen3_moe")),
    *NATIVE_CASES[1:],
)
"""These run in ``make test-sweeps`` only.

One agent chooses the experts of each family in test_families.py. deepseek_v3 and gpt_oss divide whole experts like
deepseek_v2 and qwen3_moe. deepseek_v3 has the same columns as deepseek_v2_lite. deepseek_v2 has the same native
products of experts as the other models. gpt_oss also has biases of experts. Two agents compute them in float32, and
test_every_config.py computes them with native operators.
"""
SETUPS = {"experts": WHOLE_EXPERTS, "columns": COLUMNS, "native": NATIVE, "native columns": NATIVE_COLUMNS}
NAMES = {id(setup): name for name, setup in SETUPS.items()}
MOST_TIES = 0.08
"""Maximum fraction of a model's tokens in float16 that may differ."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function that runs a setup and returns the results of the agent that samples.

    Each setup runs once, as a group that runs all its models of ``make test``, or its other models.
    """
    scratch = tmp_path_factory.mktemp("expert-parallel")

    @cache
    def run(name: str, is_swept: bool) -> dict[str, Any]:
        setup = SETUPS[name]
        cases = [case for case in CASES + NATIVE_CASES if case[0] is setup and (case in SWEPT_CASES) == is_swept]
        folders = {model: scratch / name / model for _, model in cases}
        for model, folder in folders.items():
            write_model(FAMILY_VARIANTS[model], folder)
        return run_group(setup, folders)[0]

    return lambda setup, model: run(NAMES[id(setup)], (setup, model) in SWEPT_CASES)[model]


def params(cases: Sequence[tuple[Setup, str]]) -> list[Any]:
    """Returns the test parameters of the cases."""
    return [
        pytest.param(
            setup,
            model,
            id=f"{NAMES[id(setup)]}-{model}",
            marks=[pytest.mark.sweep] if (setup, model) in SWEPT_CASES else [],
        )
        for setup, model in cases
    ]


@pytest.mark.parametrize(("setup", "model"), params(CASES))
def test_float32_gives_the_oracles_tokens_exactly(results: Any, setup: Setup, model: str) -> None:
    expected = [case["tokens"] for case in golden_of(model)["cases"]]
    found = results(setup, model)
    assert found["free"] == expected
    assert found["forced"] == expected


@pytest.mark.parametrize(("setup", "model"), params(NATIVE_CASES))
def test_native_operators_differ_from_the_oracle_only_at_ties(results: Any, setup: Setup, model: str) -> None:
    check_forced(golden_of(model)["cases"], results(setup, model)["forced"], "float16", MOST_TIES, f"{model} native")


@pytest.mark.parametrize(("setup", "model"), params(CASES + NATIVE_CASES))
def test_a_position_gives_the_same_bits_however_it_is_computed(results: Any, setup: Setup, model: str) -> None:
    check_position_bits(results(setup, model)["invariance"])


def test_agents_of_a_group_hold_the_experts_once(tmp_path: Path) -> None:
    """If each expert is whole, it belongs to exactly one agent.

    The numbers of experts of two agents differ by at most one.
    """
    folder = tmp_path / "model"
    write_model(FAMILY_VARIANTS["deepseek_v3"], folder)
    config = WHOLE_EXPERTS.config(folder)
    spans = [config.shard(rank).experts for rank in range(2)]
    assert [(span.start, span.stop) for span in spans if span is not None] == [(0, 5), (5, 9)]
