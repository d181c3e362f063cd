"""Starts an agent process: ``python -m agent --bootstrap-fd N --socket-fd M``. Only the launcher does this."""

from __future__ import annotations

import sys

from agent.model_runner import ModelRunner
from agent.process import run_agent

if __name__ == "__main__":
    sys.exit(run_agent(ModelRunner))
