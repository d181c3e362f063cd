"""Implements a TCP socket that knows when received bytes arrived at this machine.

The load test shares its cores with the server. Arrived bytes wait in the socket until the event loop wakes up and reads
them; real clients do not have this delay. Therefore the arrival time is when the kernel received the bytes
(``SO_TIMESTAMPNS``, socket(7)). Writes go to the kernel immediately.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import time
from time import perf_counter
from typing import Protocol

_SO_TIMESTAMPNS = 35  # the value on 64-bit Linux; Python's socket module has no name for it
_TIMESPEC = struct.Struct("@qq")
ANCILLARY_BYTES = 64
"""Bytes for the ancillary data of ``recvmsg``. A time stamp needs fewer."""
_READ_BYTES = 256 * 1024
"""Bytes that are read at a time."""
_HAS_TIMESTAMPS = sys.platform == "linux"
_SAME_MOMENT_S = 1e-4
"""Two clocks are read at the same moment if the readings take less than this number of seconds."""
_MAX_READINGS = 5
"""Maximum number of attempts to read two clocks at the same moment."""


class SocketUser(Protocol):
    """Receives the events of a ``TimedSocket``."""

    def received(self, data: bytes, now: float) -> None:
        """Reports that ``data`` arrived at ``now``, on the clock of ``perf_counter``."""

    def lost(self, error: OSError | None, now: float) -> None:
        """Reports the end of the connection. ``error`` is None if the peer closed it, otherwise the failure."""


class TimedSocket:
    """A connected socket in the running event loop. After ``close``, it calls no method of its ``SocketUser``."""

    def __init__(self, sock: socket.socket, user: SocketUser) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self._user = user
        self._unsent = b""
        self.is_open = True
        self._is_watched = True
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request_time_stamps(sock)
        self._loop.add_reader(sock, self.read)

    @classmethod
    async def connect(cls, host: str, port: int, user: SocketUser) -> TimedSocket:
        """Connects to a host and returns the socket. Raises ``OSError`` if no address of the host responds."""
        loop = asyncio.get_running_loop()
        failure: OSError | None = None
        for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            try:
                await loop.sock_connect(sock, address)
            except OSError as error:
                failure = error
                sock.close()
            except BaseException:
                sock.close()
                raise
            else:
                return cls(sock, user)
        raise failure or OSError(f"{host} has no address")

    def write(self, data: bytes) -> None:
        """Writes as many bytes as the socket accepts, and the remaining bytes when it accepts more.

        A broken connection is reported by ``lost``.
        """
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the next read of the socket reports this error
        if sent < len(data):
            self._unsent = data[sent:]
            self._loop.add_writer(self._socket, self._write_rest)

    def watch(self, *, is_watched: bool) -> None:
        """Sets whether arriving bytes wake the event loop, which then reads them. Otherwise, only ``read`` reads them.

        If the system does not report when bytes arrived, the socket is always watched.
        """
        if is_watched == self._is_watched or not self.is_open or not _HAS_TIMESTAMPS:
            return
        self._is_watched = is_watched
        if is_watched:
            self._loop.add_reader(self._socket, self.read)
        else:
            self._loop.remove_reader(self._socket)

    def close(self) -> None:
        """Closes the socket immediately and drops unsent data."""
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()

    def _write_rest(self) -> None:
        data, self._unsent = self._unsent, b""
        self._loop.remove_writer(self._socket)
        self.write(data)

    def read(self) -> None:
        """Reads the bytes that have arrived, if there are any, and passes them to the ``SocketUser``.

        If several pieces have arrived, their arrival time is that of the last one.
        """
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_READ_BYTES, ANCILLARY_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(error)
            return
        if data:
            self._user.received(data, arrival_time(ancillary))
        else:
            self._end(None)

    def _end(self, error: OSError | None) -> None:
        self.close()
        self._user.lost(error, perf_counter())


def request_time_stamps(sock: socket.socket) -> None:
    """Makes the kernel add the time of arrival to the bytes that ``sock.recvmsg`` returns, if the system can do so."""
    if _HAS_TIMESTAMPS:
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)


def arrival_time(ancillary: list[tuple[int, int, bytes]]) -> float:
    """Returns the time of ``perf_counter`` at which the last bytes arrived in the kernel.

    ``ancillary`` are the data that ``recvmsg`` returned with the bytes. If they have no time stamp, returns the current
    time.
    """
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS:
            seconds, nanoseconds = _TIMESPEC.unpack(content)
            now, wall = _both_clocks()
            age = wall - (seconds * 1_000_000_000 + nanoseconds)
            return now - max(age, 0) * 1e-9
    return perf_counter()


def _both_clocks() -> tuple[float, int]:
    """Reads two clocks at the same time: ``perf_counter`` in seconds, and the clock of time stamps in nanoseconds.

    If the process has to wait for a core between the readings, they do not belong together. The clocks are then read
    again.
    """
    for _ in range(_MAX_READINGS):
        before, wall, after = perf_counter(), time.time_ns(), perf_counter()
        if after - before < _SAME_MOMENT_S:
            break
    return after, wall
