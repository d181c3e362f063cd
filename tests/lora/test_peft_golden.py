"""An adapter of the library PEFT, with rsLoRA and patterns of ranks and alphas, gives PEFT's log-probabilities.

``tools/make_lora_golden.py`` wrote the golden file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from support.forked_programs import run_forked
from support.json_program import printed_json
from support.lora_golden import lora_golden

WORKER = Path(__file__).with_name("peft_program.py")


def test_log_probabilities_are_those_of_peft_in_float32(tmp_path: Path) -> None:
    golden, found = lora_golden(), printed_json(run_forked(WORKER, folder=tmp_path, timeout=120))
    assert golden["config"]["use_rslora"]
    assert golden["config"]["rank_pattern"]
    for case, adapted, without in zip(golden["cases"], found["adapted"], found["without"], strict=True):
        assert adapted["tokens"] == case["tokens"]
        np.testing.assert_allclose(adapted["logprobs"], case["logprobs"], atol=1e-5, rtol=0)
        assert without["tokens"] == case["without"]
