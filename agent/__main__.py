"""Entry of an agent process: ``python -m agent --bootstrap-fd N --listen-fd M``, started by the launcher only."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading

from agent.server import AgentServer
from agent.task_queue import TaskQueue
from llm_serving.config import Config
from llm_serving.errors import ProtocolError
from llm_serving.ipc.bootstrap import BootstrapPipe
from llm_serving.ipc.shm import NUM_SLOTS


def parse_arguments() -> argparse.Namespace:
    """The two inherited descriptors."""
    parser = argparse.ArgumentParser(prog="python -m agent", description=__doc__)
    parser.add_argument("--bootstrap-fd", type=int, required=True, help="pipe with the launch secret and the config")
    parser.add_argument("--listen-fd", type=int, required=True, help="listening socket of this agent's port")
    return parser.parse_args()


def main() -> int:
    """Connect the socket thread and the device thread, and run."""
    arguments = parse_arguments()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the launcher ends agents in order.
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    pipe = BootstrapPipe(arguments.bootstrap_fd)
    try:
        bootstrap = pipe.read()
    except (ProtocolError, OSError) as error:
        print(f"agent: {error}", file=sys.stderr)  # noqa: T201
        return 2
    pipe.exit_when_launcher_goes()
    config = Config.from_json(bootstrap.config_json)

    from agent.worker import Worker  # imports mindspore, which takes a second: after the secret, before the model

    queue = TaskQueue(config.scheduler_config.policy, max_steps=NUM_SLOTS)
    worker = Worker(config, queue)
    server = AgentServer(
        socket.socket(fileno=arguments.listen_fd),
        secret=bootstrap.secret,
        rank=bootstrap.rank,
        limits=config.slot_limits(),
        queue=queue,
        steps_run=lambda: worker.steps_run,
    )
    threading.Thread(target=server.serve, name="agent-socket", daemon=True).start()
    code = worker.run(server)
    logging.shutdown()
    os._exit(code)  # MindSpore's own threads need not be waited for


if __name__ == "__main__":
    sys.exit(main())
