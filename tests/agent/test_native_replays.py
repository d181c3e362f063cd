"""Replays of native steps have the bits of the graph, and either all agents of a group replay or none.

Tests groups and experts. test_model_runner.py tests one agent with dense models.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.agent_group import Setup, seeded_runs

pytestmark = pytest.mark.timeout(400)

SETUPS = {
    "one agent": (Setup(1, 1, "bfloat16", "native"), ("qwen3_moe", "mixtral", "qwen2_tied")),
    "one agent, int4": (Setup(1, 1, "float16", "native", "int4"), ("qwen3_moe",)),
    "one agent, int8": (Setup(1, 1, "bfloat16", "native", "int8"), ("qwen3_moe",)),
    "2 share layers": (Setup(2, 1, "bfloat16", "native"), ("gqa_tied", "qwen2_tied", "qwen3_moe", "mixtral")),
    "2 stages": (Setup(1, 2, "float16", "native"), ("gqa_tied", "mixtral")),
    "2 stages of 2": (Setup(2, 2, "bfloat16", "native"), ("gqa_tied",)),
}
"""Models with experts, windows and biases, whose graphs use more than the inference primitives."""
CASES = [(name, model) for name, (_, models) in SETUPS.items() for model in models]
REASONS = {
    "unnamed": ("reads what none of our kernels wrote", "another agent cannot replay its launches"),
    "differs": ("a replay gives another result", "a replay gives another result"),
    "differs later": ("a replay gives another result", "a replay gives another result"),
    "refuses": ("a replay gives another result", "a replay gives another result"),
}
"""The reasons that agent 0, which has the planted fault, and the other agent report."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return seeded_runs(SETUPS, tmp_path_factory.mktemp("replays"), "native_replays_worker.py")


@pytest.mark.parametrize(("name", "model"), CASES)
def test_replays_have_the_bits_of_the_graph(results: Any, name: str, model: str) -> None:
    agents = [agent[model] for agent in results(name)]
    setup = SETUPS[name][0]
    for agent in agents:
        assert agent["problems"] == ["", "", ""]
        assert agent["confirmed"] == ["chunked", "decode", "prefill"]
    answering = agents[(setup.pipeline_parallel - 1) * setup.tensor_parallel]
    assert len(set(answering["by the graph"])) > 30, "the digests must differ between steps"
    assert answering["replayed"] == answering["replayed again"] == answering["by the graph"]


@pytest.mark.parametrize("plant", REASONS)
@pytest.mark.parametrize("model", SETUPS["2 share layers"][1])
def test_if_one_agent_cannot_replay_no_agent_does(results: Any, model: str, plant: str) -> None:
    """Each step still has the bits of the graph, which runs again after a wrong replay."""
    first, second = (agent[model] for agent in results("2 share layers"))
    for agent, reason in zip((first, second), REASONS[plant], strict=True):
        assert reason in agent["planted"][plant]["problem"]
        assert not agent["planted"][plant]["confirmed"]
    assert first["planted"][plant]["digests"] == first["decodes by the graph"]
