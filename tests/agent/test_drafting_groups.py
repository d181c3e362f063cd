"""Tests the drafts of two agents that share a model. The draft model is the model itself, in the agent that samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_serving.ipc.shm import NO_DRAFT
from support.agent_group import Setup, run_group
from support.draft_models import write_shorter_model
from support.golden_files import golden_of
from support.small_configs import TINY_LLAMA
from support.sweeps import with_sweeps

WIDTH, DRAFTED = 4, 20
SETTINGS = {"speculative_config.method": "draft", "speculative_config.max_draft_tokens": WIDTH}


@pytest.mark.parametrize(
    ("dtype", "op_table"),
    with_sweeps([("float32", "fused"), ("bfloat16", "native")], lambda dtype, op_table: op_table == "native"),
)
def test_one_agent_of_a_group_makes_drafts_and_all_stay_in_step(dtype: str, op_table: str, tmp_path: Path) -> None:
    """Row checks follow some steps. Later, a defect fails one step in this agent only, and then the draft model fails.
    """
    model = TINY_LLAMA if op_table == "fused" else write_shorter_model(tmp_path, 1)  # native graphs compile slowly
    setup = Setup(2, 1, dtype, op_table, extra={**SETTINGS, "speculative_config.model": str(model)})
    agents = run_group(setup, {"tiny_llama": Path(model)}, "drafting_group_program.py")
    answering, other = (agent["tiny_llama"] for agent in agents)
    assert (answering["has_drafter"], other["has_drafter"]) == (True, False)
    assert answering["summary"]["draft_kv_cache_bytes"] > other["summary"]["kv_cache_bytes"]
    assert "draft_weight_bytes" not in other["summary"]
    assert (answering["error"], other["error"]) == ("a defect of the drafter", "")
    tokens, drafts = answering["tokens"], answering["drafts"]
    if dtype == "float32":
        assert tokens == golden_of("tiny_llama")["cases"][0]["tokens"][: len(tokens)]
    made = [(place, draft) for place, draft in enumerate(drafts[: DRAFTED + 1], 1) if NO_DRAFT not in draft]
    assert len(made) == DRAFTED + 1
    right = [draft[: len(tokens) - place] == tokens[place : place + WIDTH] for place, draft in made]
    assert sum(right) >= (1.0 if dtype == "float32" else 0.9) * len(right)
    assert all(set(draft) == {NO_DRAFT} for draft in drafts[DRAFTED + 2 :])
