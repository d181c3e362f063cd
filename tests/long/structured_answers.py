"""Asks the default model for JSON under random schemas of growing difficulty, and validates each answer.

    python tests/long/structured_answers.py [--schemas 200] [--seed 0] [--clients 8]

The model samples at temperature 1. Prints one JSON line. An answer is ``cut`` if ``max_tokens`` ended it. Cut answers
are counted separately. The exit code is 1 if another answer is no JSON or does not fit its schema, or if a schema was
refused.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from support.long_program import run_program  # noqa: E402
from support.schema_values import LEVELS, Schema, problem, schema_of_level  # noqa: E402
from support.server_process import ServerProcess, running_server  # noqa: E402

CONFIG = "smollm2_135m_cpu.yaml"
SIZES = ("pa_config.num_blocks=2048", "model_config.decode_batch_size=[16]")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="seed of the schemas and of the answers")
    parser.add_argument("--clients", type=int, default=8, help="requests at the same time (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=600, help="maximum length of an answer")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    schemas = [schema_of_level(rng, 1 + index * LEVELS // arguments.schemas) for index in range(arguments.schemas)]
    with (
        tempfile.TemporaryDirectory(prefix="structured_answers_") as folder,
        running_server(Path(folder), [*SIZES, *arguments.overrides], CONFIG, forks=False) as server,
        ThreadPoolExecutor(arguments.clients) as pool,
    ):

        def ask(numbered: tuple[int, Schema]) -> str:
            return verdict(server, *numbered, arguments.seed, arguments.max_tokens)

        verdicts = Counter(pool.map(ask, enumerate(schemas)))
    print(json.dumps({"schemas": len(schemas), "valid": verdicts["valid"], "cut": verdicts["cut"],
                      "wrong": verdicts.total() - verdicts["valid"] - verdicts["cut"]}))  # fmt: skip
    return int(verdicts.total() != verdicts["valid"] + verdicts["cut"])


def verdict(server: ServerProcess, number: int, schema: Schema, seed: int, max_tokens: int) -> str:
    """Returns ``valid``, ``cut``, or ``wrong`` after a line on standard error that explains it."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Write an example of this as JSON: {json.dumps(schema)}"}],
        "max_tokens": max_tokens,
        "temperature": 1,
        "seed": seed + number,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    }
    answer = server.post("/v1/chat/completions", body, timeout_s=600)
    if "status" in answer:
        print(f"schema {number}: {answer}", file=sys.stderr)
        return "wrong"
    choice = answer["choices"][0]
    if choice["finish_reason"] == "length":
        return "cut"
    text = choice["message"]["content"]
    try:
        reason = problem(json.loads(text), schema, schema)
    except ValueError as error:
        reason = f"no JSON: {error}"
    if reason is not None:
        print(f"schema {number}: {reason}: {text}", file=sys.stderr)
    return "valid" if reason is None else "wrong"


if __name__ == "__main__":
    sys.exit(run_program(main))
