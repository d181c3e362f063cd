"""Tests that replays of native steps give the graph's bits. Either all agents of a group replay a step, or none does.

These tests cover groups and experts. test_model_runner.py tests one agent with dense models.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.agent_group import Setup, seeded_runs
from support.sweeps import with_sweeps

pytestmark = pytest.mark.timeout(400)

SETUPS = {
    "one agent": Setup(1, 1, "bfloat16", "native"),
    "one agent, int4": Setup(1, 1, "float16", "native", "int4"),
    "one agent, int8": Setup(1, 1, "bfloat16", "native", "int8"),
    "2 share layers": Setup(2, 1, "bfloat16", "native"),
    "2 share layers, int8": Setup(2, 1, "bfloat16", "native", "int8"),
    "2 stages": Setup(1, 2, "float16", "native"),
    "2 stages of 2": Setup(2, 2, "bfloat16", "native"),
    "large cache": Setup(
        1, 1, "bfloat16", "native",
        extra={"pa_config.num_blocks": 8192, "scheduler_config.max_num_batched_tokens": 1024},
    ),
}  # fmt: skip
CASES = [
    ("2 share layers, int8", "qwen3_moe"),
    ("2 stages", "gqa_tied"),
    ("large cache", "gpt_oss"),
]
"""Cases with experts, whose graphs also use operators beyond the inference primitives, with two pipeline stages, and
with attention sinks.
"""
SWEPT_CASES = [
    ("one agent, int8", "qwen3_moe"),
    ("2 share layers", "qwen3_moe"),
    ("one agent", "qwen2_tied"),
    ("one agent", "mixtral"),
    ("2 share layers", "gqa_tied"),
    ("one agent", "qwen3_moe"),
    ("one agent, int4", "qwen3_moe"),
    ("2 share layers", "qwen2_tied"),
    ("2 share layers", "mixtral"),
    ("2 stages", "mixtral"),
    ("2 stages of 2", "gqa_tied"),
]
"""These run in ``make test-sweeps`` only, because the cases of ``make test`` cover their parts."""


def params(*names: str) -> list[Any]:
    """Returns the test parameters of the cases with these names, or of all cases."""
    cases = [case for case in (*CASES, *SWEPT_CASES) if not names or case[0] in names]
    return with_sweeps(cases, lambda *case: case in SWEPT_CASES)


REASONS = {
    "unnamed": ("reads what none of our kernels wrote", "another agent cannot replay its launches"),
    "differs": ("a replay gives another result", "a replay gives another result"),
    "differs later": ("a replay gives another result", "a replay gives another result"),
    "refuses": ("a replay gives another result", "a replay gives another result"),
}
"""For each fault: the reason that agent 0 reports, which has the fault, and that of the other agent."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def num_layers(name: str) -> int:
        if name == "large cache":
            return 2  # a layer of gpt-oss with a window, and one without
        return SETUPS[name].pipeline_parallel  # the recorded launches of a layer do not depend on other layers

    return seeded_runs(SETUPS, tmp_path_factory.mktemp("replays"), "native_replays_worker.py", num_layers)


@pytest.mark.parametrize(("name", "model"), params())
def test_replays_have_the_bits_of_the_graph(results: Any, name: str, model: str) -> None:
    agents, setup = results(name, model), SETUPS[name]
    kinds = ["chunked"] if model == "gpt_oss" else ["chunked", "decode", "prefill"]
    for agent in agents:
        assert agent["problems"] == [""] * len(kinds)
        assert agent["confirmed"] == kinds
        assert agent["runs of the graph"] == 0, "after the first steps, all steps are replays"
    answering = agents[(setup.pipeline_parallel - 1) * setup.tensor_parallel]
    assert len(set(answering["by the graph"])) > 30, "the digests must differ between steps"
    assert answering["replayed"] == answering["replayed again"] == answering["by the graph"]


def test_replays_of_attention_with_sinks_do_not_copy_the_cache(results: Any) -> None:
    """The graph copies both caches of a layer, to give them three axes. A replay has no memory for this copy."""
    (agent,) = results("large cache", "gpt_oss")
    assert agent["bytes of replays"] < agent["bytes of a cache"]


@pytest.mark.parametrize("plant", REASONS)
@pytest.mark.parametrize(("name", "model"), params("2 share layers", "2 share layers, int8"))
def test_if_one_agent_cannot_replay_no_agent_does(results: Any, name: str, model: str, plant: str) -> None:
    """All steps still give the graph's bits, because the agents run the graph again after a wrong replay."""
    first, second = results(name, model)
    for agent, reason in zip((first, second), REASONS[plant], strict=True):
        assert reason in agent["planted"][plant]["problem"]
        assert not agent["planted"][plant]["confirmed"]
    assert first["planted"][plant]["digests"] == first["decodes by the graph"]
