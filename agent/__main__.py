"""Entry of an agent process: ``python -m agent --bootstrap-fd N --listen-fd M``, started by the launcher only."""

from __future__ import annotations

import sys

from agent.process import run_agent
from agent.worker import Runner, StartReport
from llm_serving.config import Config
from llm_serving.ipc.exchange import ExchangeMemory


def make_runner(config: Config, report: StartReport, rank: int, exchange: ExchangeMemory | None) -> Runner:
    """The real runner. Imported late: mindspore takes a second, and the server is answered before that."""
    from agent.model_runner import ModelRunner

    return ModelRunner(config, report, rank, exchange)


if __name__ == "__main__":
    sys.exit(run_agent(make_runner))
