"""Compares the tokens of every model family with those of Hugging Face transformers (tests/golden/families).

Each setup runs in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agent.models import registry
from llm_serving.errors import AgentStartError
from llm_serving.model.families import FAMILIES
from performance.models.variants import FAMILY_VARIANTS
from support import golden_files
from support.forked_programs import run_forked
from support.golden_files import golden_of
from support.json_program import printed_json
from support.oracle_ties import check_forced
from support.position_bits import check_position_bits, check_sharing_bits
from support.sweeps import with_sweeps

WORKER = Path(__file__).with_name("families_worker.py")
MODELS = tuple(FAMILY_VARIANTS)
FLOAT32 = ("float32", "fused", "auto", "auto")
HALF_SETUPS = tuple(
    (dtype, table, "auto", "auto") for table in ("fused", "native") for dtype in ("float16", "bfloat16")
)
QUANTISED_SETUPS = (
    ("bfloat16", "fused", "int8", "auto"),
    ("float32", "fused", "int4", "int8"),
)
SETUPS = (FLOAT32, *HALF_SETUPS, *QUANTISED_SETUPS)
QUANTISED_MODELS = ("qwen2_tied", "phi4_mini", "qwen3_moe", "deepseek_v2_lite", "gpt_oss_mxfp4")
"""The models that ``make test`` quantises."""
NATIVE = ("bfloat16", "native", "auto", "auto")
NATIVE_MODELS = ("phi4_mini", "qwen2_yarn_window", "gemma3")
"""The models that ``make test`` runs with native operators: one of each architecture, without ``NATIVE_ELSEWHERE``."""
NATIVE_ELSEWHERE = {
    "LlamaForCausalLM": "test_model_runner.py",
    "MistralForCausalLM": "qwen2_yarn_window: Mistral is Llama with this window",
    "MixtralForCausalLM": "qwen2_yarn_window has its window, and Qwen3MoeForCausalLM its experts",
    "Qwen3ForCausalLM": "tests/integration/test_families.py",
    "Qwen3MoeForCausalLM": "test_native_experts.py and test_native_replays.py",
    "DeepseekV2ForCausalLM": "test_expert_parallel.py",
    "DeepseekV3ForCausalLM": "test_every_config.py (RELIED_ON)",
    "GptOssForCausalLM": "test_every_config.py (RELIED_ON), and test_native_replays.py with a large cache",
}
"""Architectures whose models run here with native operators only in ``make test-sweeps``.

The value names the tests that cover the architecture in ``make test``.
"""
HALF_MODELS = ("llama_dynamic", "mixtral", "gemma3", "gpt_oss", "qwen2_tied", "qwen3_next", "deepseek_v3")
"""The models that ``make test`` runs in a half type with fused operators: one with each kind of layer."""
REFUSED_BY_NATIVE = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Models that the native operators refuse."""
STATE_MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Models with linear attention. int4 rounding changes the text of these small random models, so int4 is not tested."""
MXFP4 = ("gpt_oss_mxfp4",)
"""Models whose experts are stored as 4-bit floats. They become int8 or floats, and never int4."""
LATENT_MODELS = tuple(model for model in MODELS if "kv_lora_rank" in FAMILY_VARIANTS[model].config)
"""Models with latent attention. int4 rounding changes the text of these small random models, so int4 is not tested."""
DISCONTINUOUS = (
    ("bfloat16", "deepseek_v3"),
    ("bfloat16", "gpt_oss"),
    ("bfloat16", "gpt_oss_mxfp4"),
    ("bfloat16", "qwen3_next"),
    ("float16", "qwen3_next"),
)
"""Models whose router can choose other experts after a rounding to a half type. Then any token may change."""
LEAST_NEAR = 0.95
"""For the models in ``DISCONTINUOUS``: minimum fraction of the tokens that are among the oracle's best four."""
MOST_TIES = 0.08
"""Maximum fraction of a model's tokens that may differ.

float16 checkpoints lose bits when they become bfloat16, so the bound is higher than for Llama.
"""
LEAST_AGREEMENT = {"int8": 0.97, "int4": 0.55}
"""Minimum fraction of the tokens that are among the oracle's best four, measured over at least 300 tokens. It is low,
because rounding often changes the tokens of models with random weights.
"""

Setup = tuple[str, str, str, str]
"""Type, op table, format of the weights, format of the KV cache."""
Results = dict[str, Any]
Run = Callable[[Setup, str], Results]


def is_swept(setup: Setup, model: str) -> bool:
    """Returns whether only ``make test-sweeps`` runs a case.

    ``make test`` runs each model in float32. It runs some models in a half type, with fused and with native operators,
    and some models quantised.
    """
    if setup == FLOAT32:
        return False
    if setup in QUANTISED_SETUPS:
        return model not in QUANTISED_MODELS
    if setup[1] == "native":
        return setup != NATIVE or model not in NATIVE_MODELS
    if model not in HALF_MODELS:
        return True
    is_float16 = model in LATENT_MODELS or MODELS.index(model) % 2 == 1
    return (setup[0] == "float16") != is_float16


def of_models(setups: Iterable[Setup]) -> list[Any]:
    """Returns each pair of setup and model, except unsupported pairs and pairs whose rounding changes the text."""
    pairs = [(setup, model) for setup in setups for model in MODELS if has_setup(setup, model)]
    return with_sweeps(pairs, is_swept)


def has_setup(setup: Setup, model: str) -> bool:
    """Returns whether a model is tested with a setup."""
    if model in REFUSED_BY_NATIVE and setup[1] == "native":
        return False
    if model == "gpt_oss" and setup in QUANTISED_SETUPS:
        return False  # rounding changes its text; int8 holds the weights of gpt_oss_mxfp4, the same network, exactly
    return model not in (*LATENT_MODELS, *MXFP4, *STATE_MODELS) or setup[2] != "int4"


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns a function that gives the results of a model in a setup. One process runs all models of ``make test``."""

    @cache
    def printed(setup: Setup, models: tuple[str, ...]) -> Results:
        scratch = tmp_path_factory.mktemp("-".join(setup))
        done = run_forked(WORKER, *setup, str(scratch), *models, folder=scratch, timeout=240)
        answer: Results = printed_json(done)
        return answer

    def of_model(setup: Setup, model: str) -> Results:
        swept = is_swept(setup, model)
        models = tuple(each for each in MODELS if has_setup(setup, each) and is_swept(setup, each) == swept)
        found: Results = printed(setup, models)[model]
        return found

    return of_model


def fraction_near(model: str, forced: list[list[int]]) -> float:
    """Returns the fraction of tokens that are among the oracle's four best tokens of their positions."""
    near = [
        token in best
        for case, tokens in zip(golden_of(model)["cases"], forced, strict=True)
        for token, best in zip(tokens, case["top_ids"], strict=True)
    ]
    return sum(near) / len(near)


def test_every_family_has_a_model() -> None:
    assert {variant.config["architectures"][0] for variant in FAMILY_VARIANTS.values()} == {
        name for name, family in FAMILIES.items() if not family.vision
    }, "tests/agent/test_vision.py has the families that read images"
    assert sorted(path.stem for path in golden_files.FAMILIES.glob("*.json")) == sorted(MODELS)


def test_native_operators_run_every_architecture_that_they_support() -> None:
    supported = [model for model in MODELS if has_setup(NATIVE, model)]
    assert architectures(NATIVE_MODELS) | NATIVE_ELSEWHERE.keys() == architectures(supported)
    assert len(NATIVE_MODELS) + len(NATIVE_ELSEWHERE) == len(architectures(supported))


def architectures(models: Iterable[str]) -> set[str]:
    return {FAMILY_VARIANTS[model].config["architectures"][0] for model in models}


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AgentStartError, match="there are: LlamaForCausalLM, Mistral"):
        registry.find_model("GPT2LMHeadModel")


@pytest.mark.parametrize("model", MODELS)
def test_golden_files_belong_to_these_weights(results: Run, model: str) -> None:
    digest = results(FLOAT32, model)["digest"]
    assert digest == golden_of(model)["weights_sha256"], f"run tools/make_golden.py {model} (see its text)"


@pytest.mark.parametrize("model", MODELS)
def test_golden_text_is_not_constant(model: str) -> None:
    """Each golden text has at least five different tokens, because a constant text would test little."""
    for case in golden_of(model)["cases"]:
        assert len(case["tokens"]) == 64
        assert len(set(case["tokens"])) >= 5


@pytest.mark.parametrize("model", MODELS)
def test_float32_gives_the_oracles_tokens_exactly(results: Run, model: str) -> None:
    result = results(FLOAT32, model)
    expected = [case["tokens"] for case in golden_of(model)["cases"]]
    assert result["free"] == expected
    assert result["forced"] == expected


@pytest.mark.parametrize(("setup", "model"), of_models(HALF_SETUPS))
def test_half_types_differ_from_the_oracle_only_at_ties(results: Run, setup: Setup, model: str) -> None:
    cases, forced = golden_of(model)["cases"], results(setup, model)["forced"]
    if (setup[0], model) in DISCONTINUOUS:
        assert fraction_near(model, forced) >= LEAST_NEAR
        return
    check_forced(cases, forced, setup[0], MOST_TIES, f"{model} {'-'.join(setup)}")


@pytest.mark.parametrize(("setup", "model"), of_models(QUANTISED_SETUPS))
def test_quantised_weights_predict_nearly_the_same_tokens(results: Run, setup: Setup, model: str) -> None:
    assert fraction_near(model, results(setup, model)["forced"]) >= LEAST_AGREEMENT[setup[2]]


@pytest.mark.parametrize(("setup", "model"), of_models(SETUPS))
def test_a_position_gives_the_same_bits_however_it_is_computed(results: Run, setup: Setup, model: str) -> None:
    check_position_bits(results(setup, model)["invariance"])


@pytest.mark.parametrize(("setup", "model"), [pair for pair in of_models(SETUPS) if pair.values[1] in LATENT_MODELS])
def test_shared_copied_and_swapped_latent_vectors_give_the_same_bits(results: Run, setup: Setup, model: str) -> None:
    check_sharing_bits(results(setup, model)["sharing"])


@pytest.mark.parametrize(("setup", "model"), [pair for pair in of_models(SETUPS) if pair.values[1] in STATE_MODELS])
def test_states_give_the_same_bits_however_steps_are_run(results: Run, setup: Setup, model: str) -> None:
    """Steps may run twice, and a decode step may have several entries of one sequence. A sequence may resume from a
    snapshot that another batch row has saved.
    """
    states = results(setup, model)["states"]
    assert len(set(states["plain"])) == len(states["plain"])
    resumed = ("resumed from a prompt", "resumed from a decode step")
    for way in ("every step twice", "checked rows", "entries of one row", "after drafts", *resumed):
        assert states[way] == states["plain"], way
    assert "a step continues batch row 5 at position 100; its states continue at -1 to -1" in states["refused"]
