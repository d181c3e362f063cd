"""Starts an agent process: ``python -m agent --bootstrap-fd N --socket-fd M``. Only the launcher does this."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from agent.process import run_agent

if TYPE_CHECKING:
    from agent.model_runner import ModelRunner, StartReport
    from llm_serving.config import Config
    from llm_serving.ipc.exchange import ExchangeMemory


def _make_runner(config: Config, report: StartReport, rank: int, exchange: ExchangeMemory | None) -> ModelRunner:
    """Makes the model runner. Importing the runner's module starts threads, so the process must be confined before this
    call.
    """
    from agent.model_runner import ModelRunner

    return ModelRunner(config, report, rank, exchange, keeps_files=True)


if __name__ == "__main__":
    sys.exit(run_agent(_make_runner))
