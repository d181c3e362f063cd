#!/usr/bin/env python3
"""Counts how many tests of the JSON Schema Test Suite (2020-12, mandatory part) structured output gets right.

A test has a schema, a JSON value, and whether the value is valid. A test counts as right if the grammar of the schema
accepts a valid value or rejects an invalid value. Values are written as Python's ``json`` writes them. The exit code is
1 if an invalid value was accepted. The suite is part of the source package of ``jsonschema``, which pip downloads.

    python tools/count_schema_tests.py [--package FILE.tar.gz] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.config import load_config
from llm_serving.constraints.compiler import CompiledGrammar, GrammarCompiler
from llm_serving.constraints.grammar import schema_grammar
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.engine.tokenizer_backends import load_tokenizer
from llm_serving.errors import RequestError

PACKAGE = "jsonschema==4.26.0"
SUITE = "json/tests/draft2020-12"
RIGHT, REFUSED, TOO_STRICT, WRONGLY_ACCEPTED = "right", "schema refused", "too strict", "wrongly accepted"
VERDICTS = (RIGHT, REFUSED, TOO_STRICT, WRONGLY_ACCEPTED)


@dataclass
class Counts:
    """The number of tests by verdict, the reasons of refused schemas, and the tests with a wrong verdict."""

    verdicts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class SchemaTests:
    """Runs groups of the suite and counts the verdicts. A group is a schema with several tests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._end = tokenizer.eos_token_ids[0]
        self._compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [self._end])
        self.counts = Counts()

    def run(self, group: dict[str, Any]) -> None:
        """Runs the tests of one group and adds their verdicts to ``counts``."""
        counts, tests = self.counts, group["tests"]
        try:
            grammar = asyncio.run(self._compiler.compile(schema_grammar(group["schema"]), "schema"))
        except RequestError as error:
            counts.verdicts[REFUSED] += len(tests)
            counts.refusals[str(error)] += 1
            return
        for test in tests:
            accepts = self._accepts(grammar, json.dumps(test["data"], ensure_ascii=False))
            verdict = RIGHT if accepts == test["valid"] else WRONGLY_ACCEPTED if accepts else TOO_STRICT
            counts.verdicts[verdict] += 1
            if verdict != RIGHT:
                counts.wrong.append(f"{verdict}: {group['description']}: {test['description']}")

    def _accepts(self, grammar: CompiledGrammar, text: str) -> bool:
        constraint = grammar.start()
        for token_id in [*self._tokenizer.encode(text, add_special_tokens=False), self._end]:
            if not int(constraint.mask()[token_id // 32]) >> token_id % 32 & 1:
                return False
            if token_id != self._end:
                constraint.advance(token_id)
        return True


def groups_of(package: Path) -> Iterator[dict[str, Any]]:
    """Yields the groups of the suite in a source package of ``jsonschema``, without the optional tests."""
    with tarfile.open(package) as archive:
        for member in sorted(archive.getmembers(), key=lambda one: one.name):
            path = PurePosixPath(member.name)
            content = archive.extractfile(member)
            if str(PurePosixPath(*path.parts[1:-1])) == SUITE and path.suffix == ".json" and content is not None:
                yield from json.loads(content.read())


def downloaded(folder: Path) -> Path:
    """Downloads the source package into ``folder`` with pip and returns its path."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-binary=jsonschema", "--no-deps", "--dest", str(folder), PACKAGE], check=True)
    return next(folder.glob("*.tar.gz"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the suite and prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, help=f"the source package, if it is here already ({PACKAGE})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts to FILE")
    options = parser.parse_args(arguments)
    suite = SchemaTests(load_tokenizer(load_config("llama_tiny_cpu.yaml")))
    with tempfile.TemporaryDirectory() as folder:
        for group in groups_of(options.package or downloaded(Path(folder))):
            suite.run(group)
    counts = suite.counts
    total = counts.verdicts.total()
    print("\n".join(f"{number:4} refused: {reason}" for reason, number in counts.refusals.most_common()))
    print("\n".join(counts.wrong))
    print(f"{total} tests: " + ", ".join(f"{counts.verdicts[one]} {one}" for one in VERDICTS))
    if options.json is not None:
        figures = {"tests": total, **{one: counts.verdicts[one] for one in VERDICTS}}
        options.json.write_text(json.dumps(figures), "utf-8")
    return int(counts.verdicts[WRONGLY_ACCEPTED] > 0 or total == 0)


if __name__ == "__main__":
    sys.exit(main())
