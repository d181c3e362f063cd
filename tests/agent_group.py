"""Starts the agents of a group as processes, each with a driver of its own that goes through the same steps."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from step_config import make_config

from llm_serving.ipc.exchange import ExchangeLayout, ExchangeMemory

FOLDER = Path(__file__).resolve().parent / "agent"
TIMEOUT_S = 300


@dataclass
class Job:
    """What the group does; see ``group_worker``."""

    folder: Path
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    dtype: str = "float32"
    op_table: str = "fused"
    weights: str = "auto"
    kv: str = "auto"
    golden: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def parallel(self) -> dict[str, Any]:
        return {
            "parallel_config.tensor_parallel": self.tensor_parallel,
            "parallel_config.pipeline_parallel": self.pipeline_parallel,
        }


def run_group(job: Job, worker: str = "group_worker.py") -> list[dict[str, Any]]:
    """What each agent printed, by rank. Fails with what they said when one does."""
    config = make_config(job.folder, job.dtype, job.op_table, job.weights, job.kv, extra={**job.parallel, **job.extra})
    exchange = ExchangeMemory.create(ExchangeLayout.of(config.shape, config.slot_limits(), config.parallel_config))
    text = json.dumps({**job.__dict__, "folder": str(job.folder)})
    agents = []
    try:
        for rank in range(config.parallel_config.group_size):
            command = [sys.executable, str(FOLDER / worker), str(rank), exchange.name, text]
            agents.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        outputs = [agent.communicate(timeout=TIMEOUT_S) for agent in agents]
    finally:
        exchange.close()
        for agent in agents:
            agent.kill()
            agent.wait()
    problems = [err[-3000:] for agent, (_, err) in zip(agents, outputs, strict=True) if agent.returncode != 0]
    assert not problems, "\n".join(problems)
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]
