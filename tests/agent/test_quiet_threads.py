"""Tests the kernels' threads in the quiet mode: they sleep at once, and one thread computes small steps alone."""

from __future__ import annotations

import pytest

from agent import step_threads
from agent.backends import runtime
from agent.step_threads import MAX_ALONE_TOKENS, MAX_ALONE_WEIGHT_BYTES, StepThreads
from llm_serving.config import load_config
from llm_serving.config.sections import PowerConfig


@pytest.mark.parametrize(("mode", "spins"), [("normal", True), ("quiet", False)])
def test_threads_sleep_at_once_in_quiet_mode_only(monkeypatch, mode, spins):
    calls: list[bool] = []
    monkeypatch.setattr("agent.kernels.set_spinning", calls.append)
    monkeypatch.setattr("agent.kernels.set_threads", lambda _: None)
    runtime._use_own_threads(load_config("llama_tiny_cpu.yaml", [f"power.mode={mode}"]))
    assert calls == [spins]


@pytest.mark.parametrize(
    ("mode", "num_tokens", "weight_bytes", "calls"),
    [
        ("normal", 1, 0, ["step"]),
        ("quiet", MAX_ALONE_TOKENS, MAX_ALONE_WEIGHT_BYTES, [True, "step", False]),
        ("quiet", MAX_ALONE_TOKENS + 1, MAX_ALONE_WEIGHT_BYTES, ["step"]),
        ("quiet", 1, MAX_ALONE_WEIGHT_BYTES + 1, ["step"]),
    ],
)
def test_one_thread_computes_small_steps_of_a_small_model_in_quiet_mode_only(
    monkeypatch, mode, num_tokens, weight_bytes, calls
):
    found: list[bool | str] = []
    monkeypatch.setattr(step_threads, "set_alone", found.append)
    threads = StepThreads(PowerConfig(mode=mode))
    threads.weight_bytes = weight_bytes
    with threads.of_step(num_tokens):
        found.append("step")
    assert found == calls


def test_all_threads_compute_after_a_step_that_failed(monkeypatch):
    found: list[bool] = []
    monkeypatch.setattr(step_threads, "set_alone", found.append)
    threads = StepThreads(PowerConfig(mode="quiet"))
    with pytest.raises(RuntimeError), threads.of_step(1):
        raise RuntimeError("the graph failed")
    assert found == [True, False]
