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
"""Creates the model runner. Takes the config, a function that reports the start, the agent's rank, and the memory
that its group shares."""


def parse_arguments() -> argparse.Namespace:
    """Parses the two inherited file descriptors."""
    parser = argparse.ArgumentParser(prog="python -m agent", description="An agent. Only the launcher starts it.")
    parser.add_argument("--bootstrap-fd", type=int, required=True, help="pipe with the launch secret and the config")
    parser.add_argument("--socket-fd", type=int, required=True, help="socket that is connected to the server")
    return parser.parse_args()


class _OneLineFormatter(logging.Formatter):
    """Escapes line breaks in a message, which may contain names of the model folder. A traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name of the base class
        record.message = record.message.replace("\n", "\\n")
        return super().formatMessage(record)


def _log_to_stderr() -> None:
    """Writes log records to standard error. The server escapes other control characters and writes the file."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def run_agent(make_runner: MakeRunner) -> int:
    """Runs an agent process until it ends. Does not return after its threads have started.

    The socket thread serves the server before ``make_runner`` is called, because importing and loading take long.
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
    os._exit(code)  # do not wait for the device's own threads


def _run_threads(
    make_runner: MakeRunner, bootstrap: Bootstrap, config: Config, socket_fd: int, facts: dict[str, str]
) -> int:
    """Runs the agent's threads until it ends, and returns the exit code. ``facts`` extend the report of the start.

    NumPy is imported here, because it starts threads: a thread that runs before ``confine`` would not be confined.
    """
    from agent.server import AgentServer
    from agent.task_queue import TaskQueue
    from agent.worker import Worker
    from llm_serving.ipc.exchange import ExchangeLayout
    from llm_serving.ipc.shm import NUM_SLOTS

    is_alone = config.parallel_config.group_size == 1
    queue = TaskQueue(config.scheduler_config.policy, max_steps=NUM_SLOTS, in_order=not is_alone)
    limits = config.slot_limits()
    server = AgentServer(
        socket.socket(fileno=socket_fd),
        secret=bootstrap.secret,
        limits=limits,
        queue=queue,
        exchange=None if is_alone else ExchangeLayout.of(config.shape, limits, config.parallel_config),
    )
    threading.Thread(target=server.serve, name="agent-socket", daemon=True).start()
    return Worker(
        lambda report: make_runner(config, report, bootstrap.rank, server.exchange), queue, server, facts
    ).run()
