"""Tests the native operators' int8 KV cache by its definition: an integer and a scale for each token and head."""

from __future__ import annotations

from pathlib import Path

from support.forked_programs import run_forked
from support.json_program import printed_json

PROGRAM = Path(__file__).with_name("integer_cache_program.py")
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Maximum relative rounding error of the type: half of the distance between neighbouring numbers."""


def test_keys_and_values_are_integers_times_their_own_scale(tmp_path: Path) -> None:
    found = printed_json(run_forked(PROGRAM, folder=tmp_path))
    assert len(found) == 6
    for name, parts in found.items():
        for part in parts.values():
            # The scale is the sum of two numbers, so nearly all of the error is the result's own rounding.
            assert part["ulp"] < 1.02 * ROUNDING[name.split()[0]], name
            assert part["same"], f"{name}: a prompt and its chunks must attend to the same numbers"
            assert part["others"] == 0, f"{name}: a slot that is not written keeps its zeros"
