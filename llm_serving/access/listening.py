"""Opens the sockets of the server's ports."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

from llm_serving.config.serving_section import ServingConfig
from llm_serving.errors import ConfigError

BACKLOG = 2048
"""Maximum number of new connections that wait at a listening socket until the server accepts them."""

UNIX_MODES = {"owner": 0o600, "group": 0o660, "all": 0o666}
"""Permission bits of a UNIX socket for each value of ``serving_config.unix_socket_users``."""
_UNIX_KEY = "serving_config.unix_socket"


class Sockets(NamedTuple):
    """The listening sockets of the server."""

    http: socket.socket
    admin: socket.socket | None
    """The socket for administration. None if the config has no port for it."""
    unix: socket.socket | None
    """The UNIX socket for programs on the same machine. None if the config names none."""


def open_sockets(settings: ServingConfig, owned: ExitStack) -> Sockets:
    """Listens on the ports and on the UNIX socket that the config names. ``owned`` closes the sockets.

    Raises ConfigError if a port or the socket is in use.
    """
    key = "serving_config.server_port"
    http = owned.enter_context(listen(settings.server_ip, settings.server_port, backlog=BACKLOG, key=key))
    admin, unix = None, None
    if settings.admin_port is not None:
        key = "serving_config.admin_port"
        admin = owned.enter_context(listen(settings.admin_ip, settings.admin_port, backlog=BACKLOG, key=key))
    if settings.unix_socket is not None:
        mode = UNIX_MODES[settings.unix_socket_users]
        unix = owned.enter_context(listen_unix(settings.unix_socket, mode, backlog=BACKLOG))
    return Sockets(http, admin, unix)


def bound_socket(ip: str, port: int) -> socket.socket:
    """Returns a TCP socket that is bound to ``port``, or to any free port if ``port`` is 0. The socket does not listen
    yet.

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
    """Listens on ``port``, or on any free port if ``port`` is 0. At most ``backlog`` new connections wait.

    If the port is in use, raises ConfigError. The message begins with ``key``, the config key that sets the port.
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


@contextlib.contextmanager
def listen_unix(path: str, mode: int, *, backlog: int) -> Iterator[socket.socket]:
    """Listens on a UNIX socket with the permission bits ``mode``. Removes the socket's file at the end.

    A socket file that an earlier server left behind is replaced. Raises ConfigError if another server listens on
    ``path``, or if ``path`` is not a socket.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.closing(listener):
        try:
            _remove_abandoned(path)
            os.fchmod(listener.fileno(), mode)  # before ``bind``, which then creates the file with this mode
            listener.bind(path)
            os.chmod(path, mode)  # some systems ignore the mode that was set before ``bind``
            listener.listen(backlog)
            made = os.stat(path).st_ino
        except OSError as error:
            raise ConfigError(f"{_UNIX_KEY}: cannot listen on {path}: {error.strerror or error}") from error
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == made:  # not if another server has replaced the file by its own
                    os.unlink(path)


def _remove_abandoned(path: str) -> None:
    """Removes a UNIX socket file on which no server listens.

    Raises ConfigError if a server listens, or if the path is not a socket. Raises OSError for other problems.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{_UNIX_KEY}: {path} exists and is not a socket; remove it, or choose another path")
    except FileNotFoundError:
        return
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise ConfigError(f"{_UNIX_KEY}: another server listens on {path}; stop it, or choose another path")
