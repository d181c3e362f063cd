"""Connects the parts of an agent process: bootstrap pipe, socket thread, task queue, device thread."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable

from agent.server import AgentServer
from agent.task_queue import TaskQueue
from agent.worker import Runner, StartReport, Worker
from llm_serving.config import Config
from llm_serving.errors import ProtocolError
from llm_serving.ipc.bootstrap import BootstrapPipe
from llm_serving.ipc.exchange import ExchangeLayout, ExchangeMemory
from llm_serving.ipc.shm import NUM_SLOTS

MakeRunner = Callable[[Config, StartReport, int, ExchangeMemory | None], Runner]
"""Takes the config, where to report the start, the agent's rank and what it shares with others of its group."""


def parse_arguments() -> argparse.Namespace:
    """The two inherited descriptors."""
    parser = argparse.ArgumentParser(prog="python -m agent", description="An agent; started by the launcher only.")
    parser.add_argument("--bootstrap-fd", type=int, required=True, help="pipe with the launch secret and the config")
    parser.add_argument("--listen-fd", type=int, required=True, help="listening socket of this agent's port")
    return parser.parse_args()


def run_agent(make_runner: MakeRunner) -> int:
    """Run an agent process to its end; never returns once its threads run.

    The socket thread answers the server before ``make_runner`` is called, which may then import and load for long.
    """
    arguments = parse_arguments()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    pipe = BootstrapPipe(arguments.bootstrap_fd)
    try:
        bootstrap = pipe.read()
    except (ProtocolError, OSError) as error:
        logging.getLogger("agent").error("%s", error)
        return 2
    pipe.exit_when_launcher_goes()
    config = Config.from_json(bootstrap.config_json)
    is_alone = config.parallel_config.group_size == 1
    queue = TaskQueue(config.scheduler_config.policy, max_steps=NUM_SLOTS, in_order=not is_alone)
    limits = config.slot_limits()
    server = AgentServer(
        socket.socket(fileno=arguments.listen_fd),
        secret=bootstrap.secret,
        rank=bootstrap.rank,
        limits=limits,
        queue=queue,
        exchange=None if is_alone else ExchangeLayout.of(config.shape, limits, config.parallel_config),
    )
    threading.Thread(target=server.serve, name="agent-socket", daemon=True).start()
    code = Worker(lambda report: make_runner(config, report, bootstrap.rank, server.exchange), queue, server).run()
    logging.shutdown()
    os._exit(code)  # the device's own threads need not be waited for
