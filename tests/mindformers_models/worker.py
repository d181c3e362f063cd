"""Runs small seeded models through ModelRunner in one type, and prints the results as JSON.

Each model runs as this project's model (op_table native) and as MindFormers' model.

    python tests/mindformers_models/worker.py DTYPE SCRATCH_FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "agent")]

import numpy as np  # noqa: E402
from runner_worker import generate, run_invariance  # noqa: E402
from step_driver import StepDriver  # noqa: E402

from agent.layers.rotary import rotary_tables  # noqa: E402
from agent.weights.storage import to_float32  # noqa: E402
from llm_serving.config.mindformers_models import rotary_positions  # noqa: E402
from performance.kernels.library import replace_product_library  # noqa: E402
from performance.kernels.routes import recorded_routes  # noqa: E402
from performance.models.folders import write_model  # noqa: E402
from support.mindformers_variants import VARIANTS  # noqa: E402
from support.step_config import make_config  # noqa: E402

PROMPT_LENS = (3, 17, 33, 75)
NUM_TOKENS = 64


def prompts(vocab_size: int) -> list[dict[str, Any]]:
    """Returns cases in the format of ``runner_worker``: each has a prompt, and zeros instead of known tokens."""
    return [
        {"prompt": [(7 + 31 * i * (length + i)) % vocab_size for i in range(length)], "tokens": [0] * NUM_TOKENS}
        for length in PROMPT_LENS
    ]


def tokens(driver: StepDriver, cases: list[dict[str, Any]], *, forced: bool) -> list[list[Any]]:
    """Returns (token, best ids, logits of the best ids) for each case and each step."""
    steps = generate(driver, cases, forced=forced)
    return [[(step[i].token, step[i].top_ids, step[i].top_logits) for step in steps] for i in range(len(cases))]


def rotary_error(driver: StepDriver) -> float:
    """Returns the largest difference between MindFormers' rotary tables and ours, over all served positions."""
    from agent.layers.parameter import as_storage  # this import loads MindSpore, which must be set up before

    model, config = driver.runner._model.network, driver.config
    if hasattr(model, "gpt"):
        theirs = [model.gpt.rotary_pos_emb.cos_cache, model.gpt.rotary_pos_emb.sin_cache]
    else:
        theirs = [model.llama.freqs_mgr.freqs_cos, model.llama.freqs_mgr.freqs_sin]
    assert [table.shape[0] for table in theirs] == [rotary_positions(config)] * 2
    ours = rotary_tables(config.shape, config.max_model_len)
    stored = [as_storage(table)[: config.max_model_len] for table in theirs]
    floats = [to_float32(table, "bfloat16" if table.dtype == np.uint16 else "float") for table in stored]
    return max(float(np.abs(table - own).max()) for table, own in zip(floats, ours, strict=True))


def main() -> None:
    dtype, scratch = sys.argv[1], Path(sys.argv[2])
    replace_product_library()
    results: dict[str, Any] = {}
    for name, variant in VARIANTS.items():
        write_model(variant, scratch / name)
        cases = prompts(variant.config["vocab_size"])
        driver = StepDriver(make_config(scratch / name, dtype, "native"))
        ours = tokens(driver, cases, forced=False)
        for case, steps in zip(cases, ours, strict=True):
            case["tokens"] = [token for token, _, _ in steps]
        # Experts are recorded only in the second run; in the first, some steps run twice to confirm a replay.
        with recorded_routes() as our_routes:
            tokens(driver, cases, forced=True)
        theirs = {"model_config.model_type": "mindformers"}
        driver = StepDriver(make_config(scratch / name, dtype, "native", extra=theirs))
        with recorded_routes(our_routes.chosen) as routes:
            their_tokens = [[step[0] for step in steps] for steps in tokens(driver, cases, forced=True)]
        results[name] = {
            "ours": ours,
            "theirs": their_tokens,
            "num_routes": [len(our_routes.chosen), len(routes.chosen)],
            "route_margin": routes.widest_margin,
            "invariance": run_invariance(driver, {"cases": cases}),
            "summary": driver.runner.summary(),
            "rotary_error": rotary_error(driver),
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
