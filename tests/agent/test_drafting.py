"""Tests the drafts of an agent whose draft model is the model itself: each draft must be the model's own next token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llm_serving.ipc.shm import NO_DRAFT
from support.forked_programs import run_forked
from support.json_program import printed_json
from support.sweeps import with_sweeps

PROGRAM = Path(__file__).with_name("drafting_program.py")
PROMPT_LENGTH, WIDTH, SHORT = 18, 5, 40
"""Values of the program: tokens of the prompt, drafts of a step, and contexts of the short draft model."""


@pytest.mark.parametrize(
    ("dtype", "op_table", "cache"),
    with_sweeps(
        [("float32", "fused", "auto"), ("bfloat16", "native", "auto"), ("bfloat16", "native", "int8")],
        lambda dtype, op_table, cache: op_table == "native",
    ),
)
def test_drafts_are_the_next_tokens(dtype: str, op_table: str, cache: str, tmp_path: Path) -> None:
    found: dict[str, dict[str, Any]] = printed_json(run_forked(PROGRAM, dtype, op_table, cache, folder=tmp_path))
    assert found["late"]["output"][:30] == found["always"]["output"][:30]
    for name in ("late", "always", "behind a prefix", "behind a copy", "sent tokens"):
        output, drafts = found[name]["output"], found[name]["drafts"]
        assert len(drafts) >= 9
        for count, draft in drafts:
            made = [token_id for token_id in draft if token_id != NO_DRAFT]
            following = output[count : count + len(made)]
            assert made
            assert made[: len(following)] == following, (name, count)
    assert {len(draft) for _, draft in found["late"]["drafts"]} == {5}
    assert all(set(draft) == {NO_DRAFT} for _, draft in found["unknown prefix"]["drafts"])
    check_short_contexts(found["short contexts"], found["always"]["output"])


def check_short_contexts(run: dict[str, Any], output: list[int]) -> None:
    """Checks that a draft model makes drafts only for the positions of its contexts, and that the text stays the same.
    """
    assert run["output"] == output[: len(run["output"])]
    numbers = []
    for count, draft in run["drafts"]:
        made = [token_id for token_id in draft if token_id != NO_DRAFT]
        following = output[count : count + len(made)]
        assert made[: len(following)] == following, count
        numbers.append(len(made))
    last_positions = [PROMPT_LENGTH + count - 1 for count, _ in run["drafts"]]
    assert numbers == [max(0, min(WIDTH, SHORT - position)) for position in last_positions]
    assert (numbers[0], numbers[-1]) == (WIDTH, 0)
