"""Tests the load client's socket: a piece's arrival time is when the kernel received its bytes."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from time import perf_counter

import pytest

from performance.load import timed_socket
from performance.load.timed_socket import TimedSocket


class Recorder:
    """Stores the events of a TimedSocket."""

    def __init__(self) -> None:
        self.data: list[tuple[bytes, float]] = []
        self.error: OSError | None = None
        self.is_lost = asyncio.Event()
        self.has_data = asyncio.Event()

    def received(self, data: bytes, now: float) -> None:
        self.data.append((data, now))
        self.has_data.set()

    def lost(self, error: OSError | None, now: float) -> None:
        self.error = error
        self.is_lost.set()


async def _connected() -> tuple[TimedSocket, Recorder, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        user = Recorder()
        timed = await TimedSocket.connect("127.0.0.1", listener.getsockname()[1], user)
        peer, _ = listener.accept()
    return timed, user, peer


def test_a_busy_event_loop_does_not_delay_arrival() -> None:
    async def run() -> None:
        timed, user, peer = await _connected()
        # The kernel adds receive times to packets shortly after the first socket has requested them.
        await asyncio.sleep(0.1)
        with peer:
            before = perf_counter()
            peer.sendall(b"a token")
            sent = perf_counter()
            time.sleep(0.2)  # blocks the event loop
            await user.has_data.wait()
        timed.close()
        [(data, arrival)] = user.data
        assert data == b"a token"
        assert before - 0.01 <= arrival <= sent + 0.05

    asyncio.run(run())


def test_a_socket_that_is_not_watched_is_read_on_demand_and_knows_the_arrival() -> None:
    async def run() -> None:
        timed, user, peer = await _connected()
        await asyncio.sleep(0.1)  # see above
        timed.watch(is_watched=False)
        with peer:
            peer.sendall(b"first")
            await asyncio.sleep(0)
            peer.sendall(b"last")
            sent = perf_counter()
            await asyncio.sleep(0.2)
            assert user.data == []
            timed.read()
            timed.read()  # nothing has arrived since
            [(data, arrival)] = user.data
            assert data == b"firstlast"
            assert arrival <= sent + 0.05
            user.has_data.clear()
            timed.watch(is_watched=True)
            peer.sendall(b"more")
            await user.has_data.wait()
        timed.close()
        timed.watch(is_watched=False)
        assert [data for data, _ in user.data] == [b"firstlast", b"more"]

    asyncio.run(run())


def test_bytes_that_the_socket_does_not_accept_are_written_later() -> None:
    async def run() -> None:
        timed, user, peer = await _connected()
        message = bytes(range(256)) * 40_000
        read: list[bytes] = []

        def read_all() -> None:
            while sum(map(len, read)) < len(message) + 3:
                read.append(peer.recv(1 << 16))
            peer.close()

        timed.write(message)
        timed.write(b"end")
        thread = threading.Thread(target=read_all)
        thread.start()
        await user.is_lost.wait()
        thread.join()
        assert b"".join(read) == message + b"end"
        assert not timed.is_open

    asyncio.run(run())


def test_a_closed_peer_is_reported_once_and_a_closed_socket_has_no_callbacks() -> None:
    async def run() -> None:
        timed, user, peer = await _connected()
        peer.close()
        await user.is_lost.wait()
        assert user.error is None
        timed.close()
        other, silent, peer = await _connected()
        other.close()
        peer.close()
        await asyncio.sleep(0.01)
        assert not silent.is_lost.is_set()

    asyncio.run(run())


def test_a_port_without_a_server_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    async def run() -> None:
        with pytest.raises(ConnectionRefusedError):
            await TimedSocket.connect("127.0.0.1", port, Recorder())

    asyncio.run(run())


def test_a_pause_between_the_readings_of_two_clocks_does_not_change_the_arrival(monkeypatch) -> None:
    """The process waits 50 ms for a core after its first reading of a clock. Both clocks then show later times."""
    elapsed, readings = [0.0], [0]

    def advance() -> float:
        readings[0] += 1
        elapsed[0] += 0.05 if readings[0] == 2 else 1e-6
        return elapsed[0]

    monkeypatch.setattr(timed_socket, "perf_counter", lambda: 100.0 + advance())
    monkeypatch.setattr(timed_socket.time, "time_ns", lambda: 7_000_000_000 + int(advance() * 1e9))
    stamp = (socket.SOL_SOCKET, timed_socket._SO_TIMESTAMPNS, timed_socket._TIMESPEC.pack(7, 0))
    assert timed_socket.arrival_time([stamp]) == pytest.approx(100.0, abs=1e-4)
