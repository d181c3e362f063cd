"""Compares the drafts of heads with the guesses of torch in float32 (tests/golden/heads)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llm_serving.ipc.shm import NO_DRAFT
from support.forked_programs import run_forked
from support.golden_files import golden_of
from support.head_models import STEP
from support.json_program import printed_json
from support.sweeps import with_sweeps

PROGRAM = Path(__file__).with_name("heads_program.py")
SWEPT = (("eagle", "float32"), ("mtp_qwen3_5", "float32"), ("mtp_qwen3_5_moe", "float32"), ("eagle_hybrid", "float32"))
LEAST_EQUAL = 0.9
"""Minimum fraction of the first guesses that are the oracle's, in bfloat16."""


@pytest.mark.parametrize(
    ("method", "dtype", "op_table"),
    with_sweeps(
        [
            ("mtp", "float32", "fused"),
            ("mtp_qwen3_next", "float32", "fused"),
            ("mtp_qwen3_5", "float32", "fused"),
            ("mtp_qwen3_5_moe", "float32", "fused"),
            ("mtp_qwen3_5", "bfloat16", "fused"),
            ("eagle", "float32", "fused"),
            ("eagle_hybrid", "float32", "fused"),
            ("speculators", "float32", "fused"),
            ("mtp", "bfloat16", "native"),
            ("eagle", "bfloat16", "native"),
            ("speculators", "bfloat16", "native"),
        ],
        lambda method, dtype, op_table: op_table == "native" or (method, dtype) in SWEPT,
    ),
)
def test_drafts_are_the_oracles_guesses(method: str, dtype: str, op_table: str, tmp_path: Path) -> None:
    found: dict[str, dict[str, Any]] = printed_json(
        run_forked(PROGRAM, method, dtype, op_table, str(tmp_path), folder=tmp_path)
    )
    golden = golden_of(f"heads/{method}")
    compared = equal = 0
    counting = found.pop("counting", None)
    for name, run in found.items():
        length = equal_start(run["output"], golden["tokens"])
        assert length == len(golden["tokens"]) or dtype != "float32", name
        for count, draft in run["drafts"].items():
            guesses = golden["guesses"].get(count, [])
            assert NO_DRAFT not in draft, (name, count)
            if int(count) > len(golden["prompt"]) + length or not guesses:
                continue  # in bfloat16, the text may differ from here on
            compared += 1
            equal += draft[: len(guesses)] == guesses if dtype == "float32" else draft[0] == guesses[0]
    assert compared >= (180 if dtype == "float32" else 25)
    assert equal >= (1 if dtype == "float32" else LEAST_EQUAL) * compared
    if counting is not None:
        check_counting(counting)


def equal_start(first: list[int], second: list[int]) -> int:
    """Returns the number of equal tokens at the beginning of both lists."""
    differs = (place for place, (one, other) in enumerate(zip(first, second, strict=True)) if one != other)
    return next(differs, len(first))


def check_counting(run: dict[str, Any]) -> None:
    """Checks that each draft is right if model and head only count up."""
    output = run["output"]
    assert output == list(range(output[0], output[0] + STEP * len(output), STEP))
    assert len(run["drafts"]) == len(output)
    for draft in run["drafts"].values():
        assert len(draft) == 4
    for count, draft in run["drafts"].items():
        following = output[int(count) - 21 :][:4]
        assert draft[: len(following)] == following
