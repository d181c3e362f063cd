"""Runs sums and gathers in agents that are real processes, and checks their results."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from agent.weights.storage import from_float32, to_float32
from llm_serving.ipc.exchange import ExchangeMemory
from support.collective_values import DTYPES, SIZES, contribution
from support.time_limits import time_limit

WORKER = Path(__file__).resolve().parents[1] / "kernels/collective_worker.py"


def start(
    memory: ExchangeMemory, index: int, what: str, timeout_s: float = 60.0, *, bell: bool = False
) -> subprocess.Popen[str]:
    """Starts an agent that runs ``what`` over the exchange. With ``bell``, the agent announces its changes, as in a
    group on several machines.
    """
    layout = json.dumps(asdict(memory.layout))
    command = [sys.executable, str(WORKER), memory.name, layout, str(index), what, str(timeout_s), str(int(bell))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(agents: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """Waits for all processes. Returns the last line of each as JSON."""
    results = []
    try:
        for agent in agents:
            out, err = agent.communicate(timeout=time_limit(120))
            assert agent.returncode == 0, err
            results.append(json.loads(out.splitlines()[-1]))
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    return results


def digest(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def check_sums(results: list[dict[str, Any]]) -> None:
    """Checks that each agent has the sum of all contributions, added in the order of the agents."""
    size = len(results)
    for dtype in DTYPES:
        for count in SIZES:
            total = to_float32(contribution(0, dtype, count), dtype).copy()
            for index in range(1, size):
                total += to_float32(contribution(index, dtype, count), dtype)
            expected = digest(from_float32(total, dtype))
            assert [result[f"{dtype} {count}"] for result in results] == [expected] * size, (dtype, count)


def check_gathers(results: list[dict[str, Any]]) -> None:
    """Checks that each agent has the arrays of all agents, and the first agent has all columns of their rows."""
    for count in (1, 100, 300_001):
        whole = np.stack([contribution(index, "float32", count) for index in range(len(results))])
        assert {result[f"all {count}"] for result in results} == {digest(whole)}
    rows = {key: value for key, value in results[0].items() if key.startswith("rows")}
    assert len(rows) == 3
    assert all(rows.values())
