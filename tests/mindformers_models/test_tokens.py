"""Compares MindFormers' Qwen3, Qwen2 and Llama with this project's models over the same primitives.

Tokens are equal except for ties, whose number is limited. A position gives the same bits in every kind of step.
"""

from __future__ import annotations

import math
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.json_program import printed_json, run_program
from support.mindformers_variants import VARIANTS, needs_mindformers
from support.position_bits import check_position_bits

pytestmark = [needs_mindformers, pytest.mark.timeout(700)]

WORKER = Path(__file__).with_name("worker.py")
DTYPES = ("float16", "bfloat16")
TIE_MARGIN = {"float16": 0.01, "bfloat16": 0.1}
"""Two logits count as a tie up to this difference, in units of the standard deviation of the logits. As in
tests/agent/test_families.py.
"""
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half of the distance between neighbouring numbers from 1 to 2."""
MOST_TIES = 0.05
"""Maximum fraction of ties. MindFormers rounds SiLU before the multiplication; this project rounds once."""


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function that gives the printed results for a data type. They are computed on first use."""

    @cache
    def run(dtype: str) -> subprocess.CompletedProcess[str]:
        scratch = tmp_path_factory.mktemp(f"mindformers-{dtype}")
        return run_program(WORKER, dtype, str(scratch), folder=scratch, timeout=600, PYTHONWARNINGS="ignore")

    return lambda dtype: printed_json(run(dtype))


@pytest.mark.parametrize("model", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_equal_those_of_this_project(results: Any, dtype: str, model: str) -> None:
    """MindFormers' model gets our model's tokens as input, and must choose the same tokens, or tokens at a near tie."""
    result, margins = results(dtype)[model], []
    limit = TIE_MARGIN[dtype] * VARIANTS[model].logit_scale
    assert result["num_routes"][0] == result["num_routes"][1]
    assert result["route_margin"] < limit, "MindFormers preferred other experts by more than a near tie"
    assert len({token for steps in result["ours"] for token, _, _ in steps}) >= 16, "text worth comparing"
    for ours, theirs in zip(result["ours"], result["theirs"], strict=True):
        for step, ((token, top_ids, top_logits), their_token) in enumerate(zip(ours, theirs, strict=True)):
            if their_token != token:
                assert their_token in top_ids, f"token {step}: {their_token} is not near the best"
                margins.append(top_logits[0] - top_logits[top_ids.index(their_token)])
                assert margins[-1] < limit, f"token {step}: {margins[-1]} >= {limit}"
    total = sum(len(theirs) for theirs in result["theirs"])
    print(f"{model} {dtype}: {len(margins)} ties in {total} tokens, widest {max(margins, default=0):.3f}")
    assert len(margins) <= MOST_TIES * total


@pytest.mark.parametrize("model", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_position_gives_the_same_bits_in_every_kind_of_step(results: Any, dtype: str, model: str) -> None:
    check_position_bits(results(dtype)[model]["invariance"])


@pytest.mark.parametrize("model", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_tables_equal_those_of_this_project(results: Any, dtype: str, model: str) -> None:
    """MindFormers' rotary tables equal ours after rounding.

    A small difference is allowed, because float32 angles of some hundred radians are inexact.
    """
    scaling, largest = VARIANTS[model].config.get("rope_scaling", {}), 1.0
    if "yarn" in (scaling.get("type"), scaling.get("rope_type")):
        largest = scaling.get("attention_factor", 0.1 * math.log(scaling["factor"]) + 1.0)
    assert results(dtype)[model]["rotary_error"] <= ROUNDING[dtype] * largest + 1e-4


def test_the_agent_reports_the_package_of_the_model(results: Any) -> None:
    summary = results("float16")["qwen3_tied"]["summary"]
    assert (summary["model_type"], summary["op_table"], summary["dtype"]) == ("mindformers", "native", "float16")
