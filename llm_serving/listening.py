"""Opens the sockets of the server's ports."""

from __future__ import annotations

import socket

from llm_serving.errors import ConfigError


def bound_socket(ip: str, port: int) -> socket.socket:
    """Return a TCP socket that is bound to the port, or to any free port if it is 0. It does not listen yet.

    Raises OSError if the port is in use.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((ip, port))
    except OSError:
        bound.close()
        raise
    return bound


def listen(ip: str, port: int, *, backlog: int, key: str) -> socket.socket:
    """Listen on a port, or on any free port if it is 0. ``backlog``: maximum number of connections that wait.

    If the port is in use, this function raises ConfigError with the config's ``key``.
    """
    try:
        listener = bound_socket(ip, port)
        try:
            listener.listen(backlog)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot listen on {ip}:{port}: {error.strerror}; choose another port, or 0 for any free one"
        ) from error
    return listener
