"""A server with one failing part: ``python -m support.faulty_server SOCKET PART FILE [arguments of the server]``.

Its agents are from the fork server at ``SOCKET``.

The part fails as soon as the file exists. PART is one of these:

- ``engine``: an exception in the engine thread.
- ``thread``: the engine thread ends without an error.
- ``http``: an exception in the HTTP server.
- ``poison``: a prompt with ``POISON`` tokens kills the agent (``support.poisoned_agent``). FILE has no effect.
- ``draws``: an artificial device, which launches steps ahead, draws wrong tokens (``support.ahead_agent``). FILE has no
  effect.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from llm_serving.engine.core import EngineCore
from llm_serving.executor import agent_executor
from llm_serving.executor.agent_process import AgentProgram
from llm_serving.launcher import main
from llm_serving.server import run
from support.forks import forked_program


def failing(method: Callable[..., Any], file: Path, error: type[BaseException]) -> Callable[..., Any]:
    """Returns a function that calls ``method``, or raises ``error`` once ``file`` exists."""

    def call(*arguments: Any) -> Any:
        if file.exists():
            raise error("planted")
        return method(*arguments)

    return call


def failing_loop(file: Path) -> Callable[[run._Server], Coroutine[Any, Any, None]]:
    """Returns a main loop of the HTTP server that raises OSError once ``file`` exists."""

    async def main_loop(server: run._Server) -> None:
        while not file.exists():
            await asyncio.sleep(0.05)
        raise OSError("planted")

    return main_loop


if __name__ == "__main__":
    agents, part, trigger = forked_program(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    others = {"poison": "support.poisoned_agent", "draws": "support.ahead_agent"}
    if part == "http":
        run._Server.main_loop = failing_loop(trigger)  # type: ignore[method-assign]
    elif part in others:
        agents = AgentProgram(others[part], agents.launch)
    else:
        kind = SystemExit if part == "thread" else MemoryError
        EngineCore.step = failing(EngineCore.step, trigger, kind)  # type: ignore[method-assign]
    executor = partial(agent_executor.AgentExecutor, program=agents)
    agent_executor.AgentExecutor = executor  # type: ignore[assignment, misc]
    sys.exit(main(sys.argv[4:]))
