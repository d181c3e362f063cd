"""Tests that adapters of the library PEFT give PEFT's log-probabilities, also with rsLoRA and patterns of ranks and
alphas.

``tools/make_lora_golden.py`` wrote the golden files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from performance.models.adapter import ADAPTED
from support.forked_programs import run_forked
from support.json_program import printed_json
from support.lora_golden import lora_golden

TOLERANCE = {"llama3_rope": 2e-5, "qwen3_next": 5e-5, "qwen3_5": 5e-5}
"""Maximum difference of a log-probability: the sum of the errors of PEFT and of the agent, both in float32.

For ``llama3_rope``, PEFT's log-probabilities differ by up to 7.1e-6 from those of the same model in float64. Those of
the agent differ from float64 by up to 9.1e-6 with AVX2 and AVX-512, and 8.9e-6 with the portable kernels. NumPy in
float32 differs by 1.2e-5. With linear attention, transformers itself has two results for the prompt of 40 tokens. In
one step and token by token, it gives log-probabilities that differ by 1.2e-5.
"""
WORKER = Path(__file__).with_name("peft_program.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    results: dict[str, Any] = printed_json(run_forked(WORKER, folder=tmp_path_factory.mktemp("peft"), timeout=240))
    return results


@pytest.mark.parametrize("model", ADAPTED)
def test_log_probabilities_are_those_of_peft_in_float32(found: dict[str, Any], model: str) -> None:
    golden, results = lora_golden(model), found[model]
    assert golden["config"]["use_rslora"]
    assert golden["config"]["rank_pattern"]
    for case, adapted, without in zip(golden["cases"], results["adapted"], results["without"], strict=True):
        assert adapted["tokens"] == case["tokens"]
        np.testing.assert_allclose(adapted["logprobs"], case["logprobs"], atol=TOLERANCE[model], rtol=0)
        assert without["tokens"] == case["without"]
