"""The program ``python -m llm_serving.ray_driver``, which only a server starts."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading

from llm_serving.errors import ProtocolError


def main() -> int:
    """Runs the driver until the server closes its connection or ends. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m llm_serving.ray_driver", description="Places nodes with Ray.")
    parser.add_argument("--pipe-fd", type=int, required=True, help="pipe that closes when the server ends")
    parser.add_argument("--socket-fd", type=int, required=True, help="socket that is connected to the server")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends its driver itself
    connection = socket.socket(fileno=arguments.socket_fd)
    threading.Thread(target=_close_with_server, args=(arguments.pipe_fd, connection), daemon=True).start()
    from llm_serving.ray_driver.driver import RayDriver  # imported here, because Ray takes long

    try:
        RayDriver(connection).run()
    except (OSError, ProtocolError, RuntimeError, ValueError) as error:
        logging.getLogger("ray_driver").error("%s", error)
        return 1
    return 0


def _close_with_server(pipe: int, connection: socket.socket) -> None:
    """Waits until the server has ended, and then shuts the connection down, so that the driver ends its nodes."""
    while os.read(pipe, 4096):
        pass
    connection.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    sys.exit(main())
