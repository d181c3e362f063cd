"""Tests sums and gathers between agents, with real processes and a real exchange."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from agent.weights.storage import from_float32, to_float32
from llm_serving.ipc.exchange import ExchangeLayout, ExchangeMemory
from performance.kernels.calls import store
from performance.kernels.collective_calls import sum_parts
from support.collective_runs import check_gathers, check_sums, finish, start
from support.collective_values import DTYPES


@contextmanager
def exchange(size: int) -> Iterator[ExchangeMemory]:
    memory = ExchangeMemory.create(ExchangeLayout(size, 1, hidden_size=64, max_tokens=16, max_rows=4))
    try:
        yield memory
    finally:
        memory.close()


def run(size: int, what: str) -> list[dict[str, Any]]:
    with exchange(size) as memory:
        return finish([start(memory, index, what) for index in range(size)])


@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_is_of_the_agents_in_order_and_the_same_for_all(size: int) -> None:
    check_sums(run(size, "sums"))


@pytest.mark.parametrize("size", [2, 3])
def test_gathers_collect_every_part(size: int) -> None:
    check_gathers(run(size, "gathers"))


def test_calls_never_mix() -> None:
    assert run(3, "race") == [{"wrong": None}] * 3


def test_an_agent_whose_peer_never_comes_gives_up_in_time_and_hardly_computes_meanwhile() -> None:
    with exchange(2) as memory:
        (result,) = finish([start(memory, 0, "lonely", timeout_s=1.5)])
        assert memory.is_down, "whoever comes later must not wait either"
    assert "ended or did not arrive" in result["error"]
    assert 1.4 < result["seconds"] < 3.0
    assert result["processor_seconds"] < 0.2


def test_a_group_that_goes_down_frees_its_waiting_agents_at_once() -> None:
    with exchange(2) as memory:
        agent = start(memory, 1, "lonely", timeout_s=60.0)
        assert agent.stdout is not None
        assert agent.stdout.readline() == "open\n"
        time.sleep(0.3)
        memory.mark_down()
        (result,) = finish([agent])
    assert result["seconds"] < 2.0
    assert "ended or did not arrive" in result["error"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fast_sum_is_the_plain_one(dtype: str) -> None:
    """The fast sum of two agents has the same bits as a plain sum.

    The test adds every 16-bit pattern, including infinities and NaNs of either sign, in arrays of several lengths.
    """
    storage = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype]
    patterns = np.arange(1 << 16, dtype=np.uint16)
    first = patterns.view(storage) if dtype != "float32" else (patterns.astype(np.uint32) << 16).view(np.float32)
    for shift in (0, 1, 4096, 40_000):
        for count in (len(first), 13, 8, 3):
            parts = [first[:count].copy(), np.roll(first, shift)[:count].copy()]
            with np.errstate(invalid="ignore", over="ignore"):
                total = to_float32(parts[0], dtype) + to_float32(parts[1], dtype)
                plain = store(total, dtype)
            fast = sum_parts(parts, dtype)
            width = np.uint32 if dtype == "float32" else np.uint16
            same = fast.view(width) == plain.view(width)
            assert (same | np.isnan(total)).all()
            assert np.isnan(to_float32(fast, dtype)[np.isnan(total)]).all()


@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16"])
def test_sums_of_float32_are_rounded_once(out_dtype: str) -> None:
    generator = np.random.default_rng(3)
    parts = [generator.standard_normal(1003).astype(np.float32) for _ in range(3)]
    expected = from_float32(parts[0] + parts[1] + parts[2], out_dtype)
    np.testing.assert_array_equal(sum_parts(parts, "float32", out_dtype), expected)
