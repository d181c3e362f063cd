"""Sockets of the server's ports."""

from __future__ import annotations

import socket

from llm_serving.errors import ConfigError


def bound_socket(ip: str, port: int) -> socket.socket:
    """A TCP socket that has the port (0: any free one) and does not listen yet. Raises OSError when it is taken."""
    bound = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((ip, port))
    except OSError:
        bound.close()
        raise
    return bound


def listen(ip: str, port: int, *, backlog: int, key: str) -> socket.socket:
    """Listen on a port (0: any free one), with room for ``backlog`` connections that nobody has accepted yet.

    Raises ConfigError when it is taken, naming the config's ``key``.
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
