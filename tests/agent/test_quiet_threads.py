"""Tests that ``power.mode`` decides whether the kernels' threads may wait in a loop."""

from __future__ import annotations

import pytest

from agent.backends import runtime
from llm_serving.config import load_config


@pytest.mark.parametrize(("mode", "spins"), [("normal", True), ("quiet", False)])
def test_threads_sleep_at_once_in_quiet_mode_only(monkeypatch, mode, spins):
    calls: list[bool] = []
    monkeypatch.setattr("agent.kernels.set_spinning", calls.append)
    monkeypatch.setattr("agent.kernels.set_threads", lambda _: None)
    runtime._use_own_threads(load_config("llama_tiny_cpu.yaml", [f"power.mode={mode}"]))
    assert calls == [spins]
