"""A node, with agents from a fork server: ``python -m support.forked_node SOCKET [arguments of the node]``."""

from __future__ import annotations

import sys
from functools import partial

from llm_serving.agent_host import session
from llm_serving.agent_host.main import main
from llm_serving.executor.agent_process import AgentProgram
from support.forks import forked_program

if __name__ == "__main__":
    program = partial(AgentProgram, launch=forked_program(sys.argv[1]).launch)
    session.AgentProgram = program  # type: ignore[assignment, misc]
    del sys.argv[1]
    sys.exit(main())
