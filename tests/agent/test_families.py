"""Compares every model family with Hugging Face transformers (tests/golden/families), one process for each setup."""

from __future__ import annotations

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
from support.position_bits import check_position_bits
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
SWEPT = (("float16", "native", "auto", "auto"),)
"""Runs in ``make test-sweeps`` only, because it repeats what bfloat16 tests."""
MOST_TIES = 0.08
"""Maximum fraction of a model's tokens that may differ. float16 checkpoints lose bits as bfloat16, so the bound is
higher than for Llama."""
LEAST_AGREEMENT = {"int8": 0.97, "int4": 0.55}
"""Minimum fraction of tokens among the oracle's best four, of at least 300 tokens. Random weights suffer most from
rounding."""

Results = dict[str, Any]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Computes the results of each setup once, on first use."""

    @cache
    def run(*setup: str) -> Results:
        scratch = tmp_path_factory.mktemp("-".join(setup))
        done = run_forked(WORKER, *setup, str(scratch), folder=scratch, timeout=240)
        answer: Results = printed_json(done)
        return answer

    return run


def test_every_family_has_a_model() -> None:
    assert {variant.config["architectures"][0] for variant in FAMILY_VARIANTS.values()} == set(FAMILIES)
    assert sorted(path.stem for path in golden_files.FAMILIES.glob("*.json")) == sorted(MODELS)


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AgentStartError, match="there are: LlamaForCausalLM, Mistral"):
        registry.find_model("GPT2LMHeadModel")


@pytest.mark.parametrize("model", MODELS)
def test_golden_files_belong_to_these_weights(results: Any, model: str) -> None:
    digest = results(*FLOAT32)[model]["digest"]
    assert digest == golden_of(model)["weights_sha256"], f"run tools/make_golden.py {model} (see its text)"


@pytest.mark.parametrize("model", MODELS)
def test_golden_text_is_not_constant(model: str) -> None:
    """A model that repeats one token would prove little."""
    for case in golden_of(model)["cases"]:
        assert len(case["tokens"]) == 64
        assert len(set(case["tokens"])) >= 5


@pytest.mark.parametrize("model", MODELS)
def test_float32_gives_the_oracles_tokens_exactly(results: Any, model: str) -> None:
    result = results(*FLOAT32)[model]
    expected = [case["tokens"] for case in golden_of(model)["cases"]]
    assert result["free"] == expected
    assert result["forced"] == expected


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("setup", with_sweeps(HALF_SETUPS, SWEPT))
def test_half_types_differ_from_the_oracle_only_at_ties(results: Any, setup: tuple[str, ...], model: str) -> None:
    cases, forced = golden_of(model)["cases"], results(*setup)[model]["forced"]
    check_forced(cases, forced, setup[0], MOST_TIES, f"{model} {'-'.join(setup)}")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("setup", QUANTISED_SETUPS, ids="-".join)
def test_quantised_weights_predict_nearly_the_same_tokens(results: Any, setup: tuple[str, ...], model: str) -> None:
    forced = results(*setup)[model]["forced"]
    near = [
        token in best
        for case, tokens in zip(golden_of(model)["cases"], forced, strict=True)
        for token, best in zip(tokens, case["top_ids"], strict=True)
    ]
    assert sum(near) >= LEAST_AGREEMENT[setup[2]] * len(near)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("setup", with_sweeps(SETUPS, SWEPT))
def test_a_position_gives_the_same_bits_however_it_is_computed(
    results: Any, setup: tuple[str, ...], model: str
) -> None:
    check_position_bits(results(*setup)[model]["invariance"])
