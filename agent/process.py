"""Connects the parts of an agent process: bootstrap pipe, socket thread, task queue and device thread."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from agent.confinement.confine import confine
from llm_serving.config import Config
from llm_serving.errors import AgentStartError, ProtocolError
from llm_serving.ipc.bootstrap import Bootstrap, BootstrapPipe

if TYPE_CHECKING:
    from agent.model_runner import ModelRunner, StartReport
    from llm_serving.ipc.exchange import ExchangeMemory

MakeRunner: TypeAlias = "Callable[[Config, StartReport, int, ExchangeMemory | None], ModelRunner]"
"""Makes the model runner. Takes the config, a function that reports the progress of the start, the agent's rank, and
the memory that the agents of its group share.
"""


def parse_arguments() -> argparse.Namespace:
    """Parses the command line: the numbers of the two file descriptors that the launcher passes to the agent."""
    parser = argparse.ArgumentParser(prog="python -m agent", description="An agent. Only the launcher starts it.")
    parser.add_argument("--bootstrap-fd", type=int, required=True, help="pipe with the launch secret and the config")
    parser.add_argument("--socket-fd", type=int, required=True, help="socket that is connected to the server")
    return parser.parse_args()


class _OneLineFormatter(logging.Formatter):
    """Escapes line breaks in log messages, which may contain file names from the model folder.

    A traceback keeps its lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name of the base class
        record.message = record.message.replace("\n", "\\n")
        return super().formatMessage(record)


def _log_to_stderr() -> None:
    """Writes log records to standard error, which the server copies to the log file.

    Line breaks in messages are escaped here. The server escapes all other control characters.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def run_agent(make_runner: MakeRunner) -> int:
    """Runs an agent process until its end. Returns an exit code only if the start fails before the threads start.

    After the threads have started, this function ends the process itself. ``make_runner`` takes long, because it
    imports MindSpore. The socket thread starts earlier, and replies to the server during this time.
    """
    arguments = parse_arguments()
    _log_to_stderr()
    pipe = BootstrapPipe(arguments.bootstrap_fd)
    try:
        bootstrap = pipe.read()
    except (ProtocolError, OSError) as error:
        logging.getLogger("agent").error("%s", error)
        return 2
    config = Config.from_json(bootstrap.config_json)
    try:
        confinement = confine(config)
    except AgentStartError as error:
        logging.getLogger("agent").error("%s", error)
        return 2
    logging.getLogger("agent").info("confinement: %s", confinement)
    pipe.exit_when_launcher_goes()
    code = _run_threads(make_runner, bootstrap, config, arguments.socket_fd, {"confinement": confinement})
    logging.shutdown()
    os._exit(code)  # a usual exit would wait for threads of the device


def _run_threads(
    make_runner: MakeRunner, bootstrap: Bootstrap, config: Config, socket_fd: int, facts: dict[str, str]
) -> int:
    """Runs the socket thread and the device thread until the agent ends, and returns the exit code.

    ``facts`` describes the process. The agent adds it to the summary that it sends when it is ready. The imports in
    this function load NumPy, which starts threads. Therefore these imports must come after ``confine``: a thread that
    starts earlier is not confined.
    """
    from agent.server import AgentServer
    from agent.task_queue import TaskQueue
    from agent.worker import Worker
    from llm_serving.ipc.exchange import ExchangeLayout
    from llm_serving.ipc.hand_over_memory import HandOverLayout
    from llm_serving.ipc.host_pool import HostPoolLayout
    from llm_serving.ipc.shm import NUM_SLOTS
    from llm_serving.ipc.tile_memory import TileLayout

    is_alone = config.parallel_config.group_size == 1
    queue = TaskQueue(config.scheduler_config.policy, max_steps=NUM_SLOTS, in_order=not is_alone)
    limits = config.slot_limits()
    server = AgentServer(
        socket.socket(fileno=socket_fd),
        secret=bootstrap.secret,
        limits=limits,
        queue=queue,
        exchange=None if is_alone else ExchangeLayout.of(config.shape, limits, config.parallel_config),
        pool=HostPoolLayout.of(config, bootstrap.rank),
        tiles=TileLayout.of(config),
        hand_over=HandOverLayout.of(config, bootstrap.rank),
    )
    threading.Thread(target=server.serve, name="agent-socket", daemon=True).start()
    return Worker(
        lambda report: make_runner(config, report, bootstrap.rank, server.exchange), queue, server, facts
    ).run()
