"""Generates the cases of a model's golden file from a given folder in float32, and prints the tokens as JSON.

python tests/agent/beside_encoder_worker.py MODEL FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runner_worker import generate  # noqa: E402
from step_driver import StepDriver  # noqa: E402

from support.golden_files import golden_of  # noqa: E402
from support.step_config import make_config  # noqa: E402

if __name__ == "__main__":
    model, folder = sys.argv[1:]
    cases = golden_of(model)["cases"]
    steps = generate(StepDriver(make_config(Path(folder), "float32", "fused", "auto", "auto")), cases, forced=False)
    tokens = [[step[index].token for step in steps] for index in range(len(cases))]
    print(json.dumps({"tokens": tokens}))
