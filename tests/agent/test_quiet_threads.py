"""Tests the kernels' threads in the quiet mode: they sleep at once, and one thread computes small steps alone."""

from __future__ import annotations

import pytest

from agent import step_threads
from agent.backends import runtime
from agent.step_threads import MAX_ALONE_TOKENS, StepThreads
from llm_serving.config import load_config
from llm_serving.config.sections import PowerConfig


@pytest.mark.parametrize(("mode", "spins"), [("normal", True), ("quiet", False)])
def test_threads_sleep_at_once_in_quiet_mode_only(monkeypatch, mode, spins):
    calls: list[bool] = []
    monkeypatch.setattr("agent.kernels.set_spinning", calls.append)
    monkeypatch.setattr("agent.kernels.set_threads", lambda _: None)
    runtime._use_own_threads(load_config("llama_tiny_cpu.yaml", [f"power.mode={mode}"]))
    assert calls == [spins]


@pytest.mark.parametrize(("mode", "calls"), [("normal", []), ("quiet", [True, True, False, True])])
def test_one_thread_computes_small_steps_in_quiet_mode_only(monkeypatch, mode, calls):
    found: list[bool] = []
    monkeypatch.setattr(step_threads, "set_alone", found.append)
    threads = StepThreads(PowerConfig(mode=mode))
    for num_tokens in (1, MAX_ALONE_TOKENS, MAX_ALONE_TOKENS + 1, 1):
        threads.begin_step(num_tokens)
    assert found == calls
