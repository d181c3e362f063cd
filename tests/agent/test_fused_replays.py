"""Tests that replays of fused steps give the graph's bits. Either all agents of a group replay a step, or none does."""

from __future__ import annotations

from typing import Any

import pytest

from support.agent_group import Setup, seeded_runs
from support.sweeps import with_sweeps

pytestmark = pytest.mark.timeout(300)

SETUPS = {
    "one agent": Setup(1, 1, "bfloat16", "fused", "int8", "int8"),
    "2 share layers": Setup(2, 1, "float32", "fused"),
    "2 stages of 2": Setup(2, 2, "bfloat16", "fused", "int4"),
}
CASES = [("one agent", "qwen3_moe"), ("one agent", "qwen2_tied"), ("2 share layers", "gqa_tied")]
SWEPT_CASES = [
    ("one agent", "gqa_tied"),
    ("one agent", "mixtral"),
    ("2 share layers", "qwen3_moe"),
    ("2 stages of 2", "gqa_tied"),
]
"""These run in ``make test-sweeps`` only, because ``test_native_replays.py`` also tests stages."""
ALL_CASES = with_sweeps([*CASES, *SWEPT_CASES], lambda *case: case in SWEPT_CASES)
REASONS = {
    "unnamed": ("reads what none of our kernels wrote", "another agent cannot replay its launches"),
    "no launches": ("another agent cannot replay its launches", "another agent cannot replay its launches"),
    "differs": ("a replay gives another result", "a replay gives another result"),
    "differs later": ("with other inputs gives another result", "with other inputs gives another result"),
    "writes nothing": ("a replay gives another result", "a replay gives another result"),
}
"""For each fault: the reason that agent 0 reports, which has the fault, and that of the other agents of its stage."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return seeded_runs(SETUPS, tmp_path_factory.mktemp("replays"), "fused_replays_worker.py")


@pytest.mark.parametrize(("name", "model"), ALL_CASES)
def test_replays_have_the_bits_of_the_graph(results: Any, name: str, model: str) -> None:
    agents, setup = results(name, model), SETUPS[name]
    for agent in agents:
        assert (agent["problem"], agent["replays"]) == ("", True)
        assert not agent["recorded by large steps"], "a long prompt must not be computed twice"
    answering = agents[(setup.pipeline_parallel - 1) * setup.tensor_parallel]
    assert len(set(answering["by the graph"])) > 30, "the digests must differ between steps"
    assert answering["replayed"] == answering["replayed again"] == answering["by the graph"]


@pytest.mark.parametrize("plant", REASONS)
@pytest.mark.parametrize(("name", "model"), ALL_CASES)
def test_if_one_agent_cannot_replay_no_agent_does(results: Any, name: str, model: str, plant: str) -> None:
    """If one agent cannot replay, all agents of its pipeline stage take the results of the graph.

    Each stage decides on its own, because it has its own launches.
    """
    agents, setup = results(name, model), SETUPS[name]
    for rank, agent in enumerate(agents):
        found = agent["planted"][plant]
        if rank < setup.tensor_parallel:
            assert REASONS[plant][rank > 0] in found["problem"]
            assert not found["replays"]
        else:
            assert (found["problem"], found["replays"]) == ("", True)
    answering = agents[(setup.pipeline_parallel - 1) * setup.tensor_parallel]
    assert answering["planted"][plant]["digests"] == answering["by the graph"]
