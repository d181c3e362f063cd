"""Tests the benchmarks of several agents, which run as programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from performance.bench.parallel_main import TEXT_TOKENS, comparison, first_difference
from support.small_configs import REPOSITORY
from support.time_limits import time_limit


def run(program: str, tmp_path: Path, *arguments: str) -> Any:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(REPOSITORY / "performance" / program), "--json", str(figures), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=time_limit(250), check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(figures.read_text())


def test_sums_are_compared_with_the_minimum_transfer_time(tmp_path: Path) -> None:
    figures = run("bench_collectives.py", tmp_path, "--dtype", "float32")
    assert figures["one_way_us"] > 0
    medians = [figures["sums"][size]["median_us"] for size in ("256", "4096", "65536", "1048576")]
    assert medians == sorted(medians), "more bytes take longer"
    for each in figures["sums"].values():
        assert each["p99_us"] >= each["median_us"] > figures["one_way_us"], "nothing beats a word handed over"


@pytest.mark.sweep
def test_one_agent_and_two_agents_generate_the_same_texts(tmp_path: Path) -> None:
    small = ["model_config.model_dtype=float32", "model_config.op_table=fused"]
    sets = [part for each in small for part in ("--set", each)]
    one, two = run("bench_parallel.py", tmp_path, "--config", "llama_tiny_cpu.yaml", "--groups", "1x1,2x1", *sets)
    assert one["texts"][0]["tokens"] == two["texts"][0]["tokens"]
    assert len(set(one["texts"][0]["tokens"])) > 3
    for batch in one["steps"]:
        assert one["steps"][batch]["communication_share"] == 0
        assert 0 < two["steps"][batch]["communication_share"] < 1
        assert two["steps"][batch]["waiting_share"] <= two["steps"][batch]["communication_share"]


def text(tokens: dict[int, int], best: float) -> dict[str, list[Any]]:
    """Returns a generated text whose token ids are 0, except that ``tokens`` maps some positions to other ids.

    ``best`` is the logit of the best token at each position. The second-best logit is 1.
    """
    return {"tokens": [tokens.get(i, 0) for i in range(TEXT_TOKENS)], "logits": [[best, 1.0]] * TEXT_TOKENS}


def test_texts_are_compared_up_to_their_first_different_token() -> None:
    one = {"group": [1, 1], "texts": [text({}, 1.5), text({}, 1.25), text({}, 2.0)]}
    two = {"group": [2, 1], "texts": [text({}, 1.5), text({3: 7, 9: 7}, 1.5), text({}, 2.125)]}
    assert [first_difference(*both) for both in zip(one["texts"], two["texts"], strict=True)] == [None, 3, None]
    lines = comparison(one, two).splitlines()
    assert lines[0] == "tp 2 x pp 1: 1 texts with the same logits to the bit, the largest difference of one 0.25000"
    assert lines[2].split() == ["1", "3", "0.25000", "1.25000"]
    assert len(lines) == 3
