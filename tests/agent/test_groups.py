"""Compares the tokens of agents that share a model with Hugging Face's tokens.

The agents form a tensor parallel group, a pipeline parallel group, or both. Every setup is a group of real processes
that runs all models of the golden files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm_serving.errors import ConfigError
from performance.models.folders import write_model
from performance.models.variants import FAMILY_VARIANTS, VARIANTS
from support.agent_group import Setup, run_group
from support.golden_files import golden_of
from support.oracle_ties import check_forced
from support.position_bits import check_position_bits
from support.sweeps import with_sweeps

pytestmark = pytest.mark.timeout(900)
"""The time limit is high, because the first test of a setup runs all models of this setup."""

ROOT = Path(__file__).resolve().parents[2]
SEEDED = {**VARIANTS, **FAMILY_VARIANTS}
MODELS = ("tiny_llama", *SEEDED)
FLOAT32_SETUPS = (Setup(2, 1), Setup(1, 2), Setup(2, 2))
HALF_SETUPS = (
    Setup(2, 1, "bfloat16", "native"),
    Setup(1, 2, "float16", "native"),
    Setup(2, 2, "bfloat16", "fused"),
    Setup(2, 1, "float16", "fused"),
)
QUANTISED_SETUPS = (
    Setup(2, 1, "bfloat16", "fused", "int8", "int8"),
    Setup(2, 1, "float32", "fused", "int4"),
    Setup(1, 2, "bfloat16", "fused", "int4", "int8"),
)
SETUPS = (*FLOAT32_SETUPS, *HALF_SETUPS, *QUANTISED_SETUPS)
TESTED = {
    str(FLOAT32_SETUPS[0]): ("qwen3_next", "qwen3_5"),
    str(FLOAT32_SETUPS[1]): ("qwen3_5",),
    str(FLOAT32_SETUPS[2]): ("qwen2_tied", "qwen3_moe"),
}
"""The models of ``make test`` by setup. All others run in ``make test-sweeps`` only.

Two stages of two agents also cover two stages of one. ``test_parallel_golden.py`` serves half types in groups.
``test_sum_parts.py`` compares groups with int8 weights with one agent, and ``test_native_quantised_groups.py`` native
operators.
"""
MOST_TIES = 0.08
LEAST_AGREEMENT = {"int8": 0.97, "int4": 0.55}
INDIVISIBLE = ("mistral_full", "qwen2_tied")
"""Models whose heads do not end at a group of int4 weights.

Two agents cannot share them, so the config refuses them.
"""


LATENT = tuple(name for name in FAMILY_VARIANTS if "kv_lora_rank" in FAMILY_VARIANTS[name].config)
"""Models with latent attention. An int8 cache refuses them, and int4 rounding changes their text.

``test_families.py`` tests bfloat16 and native operators, and ``test_expert_parallel.py`` the division of their experts.
"""


UNTESTED = ("gpt_oss_mxfp4",)
"""Models that are left out here, because ``gpt_oss`` is the same network with float weights."""
STATE_MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Models with linear attention. int4 rounding changes their text.

Of two stages, one has a KV cache and states, and the other one has only states.
"""


def models_of(setup: Setup) -> tuple[str, ...]:
    refused = INDIVISIBLE if setup.weights == "int4" and setup.tensor_parallel > 1 else ()
    has_latent = setup.op_table == "fused" and setup.weights == "auto" and setup.dtype != "bfloat16"
    refused = refused if has_latent else (*refused, *LATENT)
    only_float32 = () if setup in FLOAT32_SETUPS else ("gpt_oss", "qwen3_next", "qwen3_5_moe")
    has_states = setup.op_table == "fused" and setup.weights != "int4"
    refused = refused if has_states else (*refused, *STATE_MODELS)
    refused = (*refused, *UNTESTED, *only_float32)
    return tuple(model for model in MODELS if model not in refused)


def is_swept(setup: Setup, model: str = "tiny_llama") -> bool:
    return model not in TESTED.get(str(setup), ())


def pairs(setups: tuple[Setup, ...]) -> list[Any]:
    """Returns each pair of a setup and one of its models."""
    return with_sweeps([(setup, model) for setup in setups for model in models_of(setup)], is_swept)


Results = dict[str, Any]


class Folders(dict[str, Path]):
    """The folders of the models by name. The first use of a folder writes its model."""

    def __init__(self, scratch: Path) -> None:
        super().__init__(tiny_llama=ROOT / "models" / "tiny_llama")
        self._scratch = scratch

    def __missing__(self, name: str) -> Path:
        write_model(SEEDED[name], self._scratch / name)
        self[name] = self._scratch / name
        return self[name]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("tp-groups"))


Run = Callable[[Setup, str], list[Results]]


@pytest.fixture(scope="session")
def results(folders: Folders) -> Run:
    """Returns a function that gives the output of each agent for a setup and a model.

    One group runs all models of ``make test``.
    """
    known: dict[tuple[str, bool], list[Results]] = {}

    def run(setup: Setup, model: str) -> list[Results]:
        swept = is_swept(setup, model)
        if (str(setup), swept) not in known:
            models = [name for name in models_of(setup) if is_swept(setup, name) == swept]
            known[str(setup), swept] = run_group(setup, {name: folders[name] for name in models})
        return [agent[model] for agent in known[str(setup), swept]]

    return run


def answer(results: Run, setup: Setup, model: str) -> Results:
    """Returns the output of the agent that samples."""
    return results(setup, model)[(setup.pipeline_parallel - 1) * setup.tensor_parallel]


@pytest.mark.parametrize(("setup", "model"), pairs(FLOAT32_SETUPS))
def test_float32_gives_the_oracles_tokens_exactly(results: Run, setup: Setup, model: str) -> None:
    result = answer(results, setup, model)
    expected = [case["tokens"] for case in golden_of(model)["cases"]]
    assert result["free"] == expected, "the agents pass each token on to the next step"
    assert result["forced"] == expected


@pytest.mark.parametrize(("setup", "model"), pairs(HALF_SETUPS))
def test_half_types_differ_from_the_oracle_only_at_ties(results: Run, setup: Setup, model: str) -> None:
    cases, forced = golden_of(model)["cases"], answer(results, setup, model)["forced"]
    check_forced(cases, forced, setup.dtype, MOST_TIES, f"{model} {setup}")


@pytest.mark.parametrize(("setup", "model"), pairs(QUANTISED_SETUPS))
def test_quantised_weights_predict_nearly_the_same_tokens(results: Run, setup: Setup, model: str) -> None:
    near = [
        token in best
        for case, tokens in zip(golden_of(model)["cases"], answer(results, setup, model)["forced"], strict=True)
        for token, best in zip(tokens, case["top_ids"], strict=True)
    ]
    assert sum(near) >= LEAST_AGREEMENT[setup.weights] * len(near)


@pytest.mark.parametrize(("setup", "model"), pairs(SETUPS))
def test_a_position_gives_the_same_bits_however_it_is_computed(results: Run, setup: Setup, model: str) -> None:
    check_position_bits(answer(results, setup, model)["invariance"])


@pytest.mark.parametrize(("setup", "model"), pairs(SETUPS))
def test_penalties_use_the_sampled_tokens(results: Run, setup: Setup, model: str) -> None:
    penalised = answer(results, setup, model)["penalised"]
    assert penalised["chosen"] == penalised["expected"]


@pytest.mark.parametrize("setup", with_sweeps([(setup,) for setup in SETUPS], is_swept))
def test_agents_share_weights_and_cache_evenly(results: Run, setup: Setup) -> None:
    """No agent has much more weights or cache than the mean of all agents."""
    agents = [agent["summary"] for agent in results(setup, "tiny_llama")]
    assert [agent["rank"] for agent in agents] == list(range(len(agents)))
    for key in ("weight_bytes", "kv_cache_bytes"):
        parts = [agent[key] for agent in agents]
        assert max(parts) < 1.35 * sum(parts) / len(parts), (key, parts)


@pytest.mark.parametrize("model", INDIVISIBLE)
def test_a_config_whose_heads_divide_int4_groups_is_refused(folders: Folders, model: str) -> None:
    with pytest.raises(ConfigError, match="the groups of 32 weights do not end where the heads"):
        Setup(2, 1, "float32", "fused", "int4").config(folders[model])
