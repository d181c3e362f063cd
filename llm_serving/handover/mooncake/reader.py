"""Reads blocks with Mooncake's engine, which runs in another process. See ``one_sided.BlockReader``."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Sequence

import msgspec

from llm_serving.executor.agent_process import launch_python
from llm_serving.handover.mooncake.library import environment
from llm_serving.handover.mooncake.messages import (
    DONE,
    MAX_PACKET_BYTES,
    PoolFile,
    Read,
    Setup,
    decode_started,
    encode,
    pack_pairs,
)
from llm_serving.handover.transport import TIMEOUT_S, Pairs, TransferError
from llm_serving.ipc.hand_over_memory import HandOverMemory
from llm_serving.ipc.segment import open_segment

MODULE = "llm_serving.handover.mooncake"
START_LIMIT_S = 60.0
READ_LIMIT_S = TIMEOUT_S - 1.0
"""Seconds after which a read fails and the process is ended.

Mooncake usually gives up earlier. A connection to a machine without power would take it minutes.
"""
REPLY_LIMIT_S = 5.0
"""Seconds in which a process must reply to a ``Read`` without pairs."""
_STANDARD_ERROR = 2


class MooncakeReader:
    """Reads blocks into the pools of a node. Starts the process immediately, and again after it has ended.

    Other nodes find the pools at ``host``. ``device`` may be empty. Every failed read ends the process, because it may
    still write into the pools. Mooncake also remembers addresses of nodes that have ended.
    """

    def __init__(self, memories: Sequence[HandOverMemory], protocol: str, device: str, host: str) -> None:
        """The pools must still have names. Raises TransferError if Mooncake does not work, and OSError."""
        self._lock, self._is_closed = threading.Lock(), False
        self._process: _EngineProcess | None = None
        with contextlib.ExitStack() as owned:
            files = []
            for memory in memories:
                files.append(open_segment(memory.name))
                owned.callback(os.close, files[-1])
            pools = [
                PoolFile(file, memory.layout.first_block, memory.layout.num_blocks, memory.layout.block_bytes)
                for file, memory in zip(files, memories, strict=True)
            ]
            self._setup = Setup(host, protocol, device, pools)
            self._running()
            self._owned = owned.pop_all()

    def place(self) -> bytes:
        process = self._running()
        try:
            process.read(b"", (), REPLY_LIMIT_S)
        except TransferError:  # it was stopped, or has just ended
            process.end()
            process = self._running()
        return process.place

    def read(self, place: bytes, pairs: Pairs) -> None:
        process = self._running()
        try:
            process.read(place, pairs, READ_LIMIT_S)
        except TransferError:
            process.end()
            raise

    def close(self) -> None:
        self._is_closed = True
        with self._lock:
            if self._process is not None:
                self._process.end()
            self._owned.close()

    def _running(self) -> _EngineProcess:
        """Returns the process, and starts a new one if it has ended. Raises TransferError."""
        with self._lock:
            if self._is_closed:
                raise TransferError("the transport is closed")
            if self._process is None or not self._process.is_alive:
                if self._process is not None:
                    self._process.end()
                self._process = _EngineProcess(self._setup)
            return self._process


class _EngineProcess:
    """A process with Mooncake's engine. Threads may call all methods at the same time."""

    def __init__(self, setup: Setup) -> None:
        """Starts the process and waits until its engine runs. Raises TransferError."""
        self._sending = threading.Lock()
        """Held while ``_control`` is used, so that no thread uses the socket after ``end`` has closed it."""
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_LIMIT_S)
        try:
            with other:
                inherited = (other.fileno(), *(pool.descriptor for pool in setup.pools))
                variables = environment(setup.protocol, setup.host)
                self._process = launch_python(MODULE, [str(other.fileno())], inherited, _STANDARD_ERROR, variables)
        except OSError as error:
            self._control.close()
            raise TransferError(f"the process of Mooncake could not be started: {error}") from error
        try:
            self._control.send(encode(setup))
            self.place = _place_of(self._control.recv(MAX_PACKET_BYTES))
        except OSError as error:
            self.end()
            raise TransferError(f"the process of Mooncake did not start its engine: {error}") from error
        except BaseException:
            self.end()
            raise

    @property
    def is_alive(self) -> bool:
        try:
            self._process.wait(timeout=0)
        except subprocess.TimeoutExpired:
            return True
        return False

    def read(self, place: bytes, pairs: Pairs, limit_s: float) -> None:
        """Reads blocks. Raises TransferError, also if this takes longer than ``limit_s`` seconds."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with own, other:
            own.settimeout(limit_s)
            try:
                with self._sending:
                    socket.send_fds(self._control, [encode(Read(place, pack_pairs(pairs)))], [other.fileno()])
                other.close()  # now the socket ends if the process ends
                reply = own.recv(MAX_PACKET_BYTES)
            except TimeoutError as error:
                raise TransferError(f"Mooncake did not end a transfer within {limit_s:.0f} s") from error
            except OSError as error:
                raise TransferError(f"the process of Mooncake has ended: {error}") from error
        if reply != DONE:
            raise TransferError(reply.decode(errors="replace") or "the process of Mooncake has ended")

    def end(self) -> None:
        """Kills the process, and waits for its end. May be called again."""
        self._process.kill()
        self._process.wait()
        with self._sending:
            self._control.close()


def _place_of(packet: bytes) -> bytes:
    """Returns the encoded place of an engine that has started. Raises TransferError."""
    if not packet:
        raise TransferError("the process of Mooncake has ended at its start; standard error of the node has its reason")
    try:
        started = decode_started(packet)
    except msgspec.DecodeError as error:
        raise TransferError(f"the process of Mooncake sent an unknown message: {error}") from error
    if started.place is None:
        raise TransferError(started.error)
    return encode(started.place)
