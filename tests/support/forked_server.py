"""The server, with agents from a fork server: ``python -m support.forked_server SOCKET [arguments of the server]``."""

from __future__ import annotations

import sys
from functools import partial

from llm_serving.executor import agent_executor
from llm_serving.launcher import main
from support.forks import forked_program

if __name__ == "__main__":
    executor = partial(agent_executor.AgentExecutor, program=forked_program(sys.argv[1]))
    agent_executor.AgentExecutor = executor  # type: ignore[assignment, misc]
    sys.exit(main(sys.argv[2:]))
