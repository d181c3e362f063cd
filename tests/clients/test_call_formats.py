"""Tests that the libraries of OpenAI and of Mistral write tool calls as ``tests/golden/calls.json`` has them.

Also tests that OpenAI's own parser reads the calls that our grammar of gpt-oss forces.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from llm_serving.parsing.formats import NAME, TOOL_FORMATS  # noqa: E402
from tools.call_golden.cases import CASES  # noqa: E402
from tools.call_golden.libraries import O200K, harmony_calls, harmony_text, mistral_text  # noqa: E402

GOLDEN = json.loads((ROOT / "tests" / "golden" / "calls.json").read_text("utf-8"))


@pytest.fixture(scope="module", autouse=True)
def _vocabulary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabulary")
    shutil.copy(distribution("litellm").locate_file(O200K), folder / "o200k_base.tiktoken")
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)


def stored(source):
    return {one["case"]: one["text"] for one in GOLDEN if one["source"] == source}


def test_harmony_writes_the_stored_calls():
    (source,) = {one["source"] for one in GOLDEN if one["source"].startswith("openai-harmony")}
    assert {case.name: harmony_text(case) for case in CASES if not case.is_parallel} == stored(source)


def test_mistral_writes_the_stored_calls():
    sources = {one["source"] for one in GOLDEN if one["source"].startswith("mistral-common")}
    assert len(sources) == 6
    for source in sources:
        texts = {case.name: mistral_text(source.rpartition(" ")[2], case) for case in CASES}
        assert {name: text for name, text in texts.items() if text is not None} == stored(source)


def test_harmony_reads_the_calls_that_our_grammar_forces():
    tool_format = TOOL_FORMATS["gpt_oss"]
    for begin in (tool_format.begin, *tool_format.other_begins):
        for case in CASES:
            for name, values in case.calls:
                arguments = json.dumps(values, ensure_ascii=False)
                text = begin.replace(NAME, name) + arguments + tool_format.end + "<|call|>"
                assert harmony_calls(text) == [(f"functions.{name}", arguments)]
