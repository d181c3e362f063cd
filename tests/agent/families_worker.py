"""Runs every model of ``performance.models.variants`` in one type and with one op table, and prints the results as
JSON.

python tests/agent/families_worker.py DTYPE OP_TABLE WEIGHT_FORMAT KV_FORMAT SCRATCH_FOLDER [MODEL ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from block_sharing import run_block_sharing  # noqa: E402
from runner_worker import generate, run_invariance  # noqa: E402
from state_runs import run_states  # noqa: E402
from step_driver import StepDriver  # noqa: E402

from performance.models.folders import write_model  # noqa: E402
from performance.models.variants import FAMILY_VARIANTS  # noqa: E402
from support.golden_files import golden_of  # noqa: E402
from support.step_config import make_config  # noqa: E402
from tools.make_golden import weights_digest  # noqa: E402


def tokens(driver: StepDriver, cases: list[dict[str, Any]], *, forced: bool) -> list[list[int]]:
    """Returns the greedy tokens of each case. With ``forced``, each step gets the oracle's token as its input."""
    steps = generate(driver, cases, forced=forced)
    return [[step[index].token for step in steps] for index in range(len(cases))]


def main() -> None:
    dtype, op_table, weights, kv, scratch, *models = sys.argv[1:]
    floats = "bf16" if dtype == "bfloat16" else dtype
    results: dict[str, Any] = {}
    for name in models or FAMILY_VARIANTS:
        golden = golden_of(name)
        folder = Path(scratch) / name
        write_model(FAMILY_VARIANTS[name], folder)
        # 4-bit floats become integers by default. Their values are also exact as floats, which the oracle uses.
        is_integer = weights == "auto" and "quantization_config" in FAMILY_VARIANTS[name].config
        driver = StepDriver(make_config(folder, dtype, op_table, floats if is_integer else weights, kv))
        results[name] = {
            "free": tokens(driver, golden["cases"], forced=False) if dtype == "float32" else None,
            "forced": tokens(driver, golden["cases"], forced=True),
            "invariance": run_invariance(driver, golden),
            "digest": weights_digest(folder),
        }
        # Models without latent attention have the same kind of cache as the models in runner_worker.py, which tests
        # sharing.
        if driver.config.shape.latent is not None:
            results[name]["sharing"] = run_block_sharing(driver, golden)
        if driver.config.shape.delta is not None:
            results[name]["states"] = run_states(driver, golden)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
