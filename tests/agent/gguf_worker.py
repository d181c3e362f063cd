"""Runs GGUF files and their oracles, and prints tokens and digests of the logits as JSON.

python tests/agent/gguf_worker.py SCRATCH_FOLDER FAMILY/TYPE ...
"""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runner_worker import generate  # noqa: E402
from step_driver import Sampled, StepDriver  # noqa: E402

from support.gguf_oracle import remove_pair, write_pair  # noqa: E402
from support.step_config import make_config  # noqa: E402

NUM_TOKENS = 24
PROMPTS = ([5, 17, 91, 203], list(range(40, 73)), [300, 8] * 12)


def steps_of(path: Path, weights: str, forced: list[list[int]] | None) -> list[list[Sampled]]:
    """Returns the greedy steps of a model for the prompts. With ``forced``, its inputs are these tokens."""
    driver = StepDriver(make_config(path, "float32", "fused", weights, "auto"))
    tokens = forced or [[0] * NUM_TOKENS for _ in PROMPTS]
    cases = [{"prompt": list(prompt), "tokens": each} for prompt, each in zip(PROMPTS, tokens, strict=True)]
    return generate(driver, cases, forced=forced is not None)


def of_prompts(steps: list[list[Sampled]], field: str) -> list[list[Any]]:
    """Returns a field of each step's results, as a list for each prompt."""
    return [[getattr(step[index], field) for step in steps] for index in range(len(PROMPTS))]


def run(family: str, kind: str, scratch: Path) -> dict[str, Any]:
    folder, file = write_pair(family, kind, scratch)
    oracle, ours = (steps_of(path, "float32", None) for path in (folder, file))
    tokens = of_prompts(oracle, "token")
    served = of_prompts(steps_of(file, "auto", tokens), "token")
    remove_pair(folder, file)
    pairs = zip(chain.from_iterable(served), chain.from_iterable(tokens), strict=True)
    return {
        "oracle": tokens,
        "float32": of_prompts(ours, "token"),
        "oracle_digests": of_prompts(oracle, "digest"),
        "digests": of_prompts(ours, "digest"),
        "tops": of_prompts(oracle, "top_ids"),
        "served": served,
        "equal": sum(one == other for one, other in pairs),
    }


def main() -> None:
    scratch, *cells = sys.argv[1:]
    print(json.dumps({cell: run(*cell.split("/"), Path(scratch)) for cell in cells}))


if __name__ == "__main__":
    main()
