"""Compares models of several families that have a LoRA adapter with the same models with merged weights.

The oracle merges in NumPy: weight + scale x B x A. The comparison covers the names, the sizes and the row order of each
family. ``tests/integration/test_lora.py`` compares a Llama with PEFT's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.forked_programs import run_forked
from support.json_program import printed_json
from support.sweeps import with_sweeps

WORKER = Path(__file__).with_name("families_worker.py")
MODELS = ("phi3", "gemma3", "gpt_oss", "qwen3_next", "qwen3_5_moe")
SWEPT_MODELS = ("phi4_mini", "qwen3_5")
"""Only ``make test-sweeps`` runs them: their adapters have the names and sizes of phi3 and qwen3_5_moe."""
ALL_MODELS = with_sweeps([(model,) for model in (*MODELS, *SWEPT_MODELS)], lambda model: model in SWEPT_MODELS)
Results = Callable[[str], dict[str, Any]]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Returns a function that gives the results of a model. One process runs all models of ``make test``."""

    @cache
    def printed(models: tuple[str, ...]) -> dict[str, Any]:
        scratch = tmp_path_factory.mktemp("adapted")
        found: dict[str, Any] = printed_json(run_forked(WORKER, str(scratch), *models, folder=scratch, timeout=240))
        return found

    return lambda model: printed(SWEPT_MODELS if model in SWEPT_MODELS else MODELS)[model]


@pytest.mark.parametrize("model", ALL_MODELS)
def test_tokens_and_logits_are_those_of_merged_weights(results: Results, model: str) -> None:
    adapted, merged, plain = (results(model)[name] for name in ("adapted", "merged", "plain"))
    assert adapted["tokens"] == merged["tokens"]
    np.testing.assert_allclose(adapted["logits"], merged["logits"], atol=2e-4, rtol=2e-4)
    assert adapted["tokens"] != plain["tokens"], "an adapter without an effect would test nothing"


@pytest.mark.parametrize("model", ALL_MODELS)
def test_bits_do_not_depend_on_other_adapters_of_the_batch(results: Results, model: str) -> None:
    found = results(model)
    assert found["mixed adapted"] == found["adapted"]
    assert found["mixed unadapted"] == found["unadapted"] == found["plain"]
