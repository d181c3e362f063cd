"""Compares models of several families that have a LoRA adapter with the same models with merged weights.

The oracle merges in NumPy: weight + scale x B x A. The comparison covers the names, the sizes and the row order of each
family. ``tests/integration/test_lora.py`` compares a Llama with PEFT's arithmetic.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.forked_programs import run_forked
from support.json_program import printed_json

WORKER = Path(__file__).with_name("families_worker.py")
MODELS = ("phi3", "phi4_mini", "gemma3", "gpt_oss", "qwen3_next", "qwen3_5", "qwen3_5_moe")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    scratch = tmp_path_factory.mktemp("adapted")
    found: dict[str, Any] = printed_json(run_forked(WORKER, str(scratch), *MODELS, folder=scratch, timeout=240))
    return found


@pytest.mark.parametrize("model", MODELS)
def test_tokens_and_logits_are_those_of_merged_weights(results: dict[str, Any], model: str) -> None:
    adapted, merged, plain = (results[model][name] for name in ("adapted", "merged", "plain"))
    assert adapted["tokens"] == merged["tokens"]
    np.testing.assert_allclose(adapted["logits"], merged["logits"], atol=2e-4, rtol=2e-4)
    assert adapted["tokens"] != plain["tokens"], "an adapter without an effect would test nothing"


@pytest.mark.parametrize("model", MODELS)
def test_bits_do_not_depend_on_other_adapters_of_the_batch(results: dict[str, Any], model: str) -> None:
    found = results[model]
    assert found["mixed adapted"] == found["adapted"]
    assert found["mixed unadapted"] == found["unadapted"] == found["plain"]
