"""Reads blocks with Mooncake's engine, which runs in another process. See ``one_sided.BlockReader``."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence

import msgspec

from llm_serving.executor.agent_process import launch_python, with_module_path
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
from llm_serving.handover.transport import TIMEOUT_S, OnCancel, Pairs, TransferError
from llm_serving.ipc.hand_over_memory import HandOverMemory
from llm_serving.ipc.segment import open_segment

MODULE = "llm_serving.handover.mooncake"
START_LIMIT_S = 60.0
"""Maximum seconds until the process with Mooncake's engine has started."""
READ_LIMIT_S = TIMEOUT_S - 1.0
"""Seconds after which a read fails and the process is killed, including the time in which the read waits for the start
of an engine.

Mooncake's own timeout is shorter. But if the other machine has lost its power, Mooncake may wait for minutes.
"""
START_WAIT_S = 2.0
"""Maximum seconds that a read waits for the start of an engine.

The rest of ``READ_LIMIT_S`` is longer than Mooncake's own timeout for a transfer.
"""
REPLY_LIMIT_S = 5.0
"""Seconds in which a process must reply to a ``Read`` without pairs."""
STILL_STARTING = "the engine of Mooncake is still starting"
_STANDARD_ERROR = 2


class MooncakeReader:
    """Reads blocks into the pools of a node, with a process that runs Mooncake's engine.

    The constructor starts the process. If the process ends, a new one is started. Every failed read ends the process,
    because Mooncake may still write into the pools, and because it would keep the addresses of ended nodes. Other nodes
    find the pools at ``host``. ``device`` is the name of the network device, or empty to let Mooncake choose.
    """

    def __init__(
        self,
        memories: Sequence[HandOverMemory],
        protocol: str,
        device: str,
        host: str,
        on_cancel: OnCancel = lambda cancel: None,
    ) -> None:
        """Opens the pools by name, so they must not be unlinked yet. Raises TransferError if Mooncake does not work.

        Raises OSError if a pool cannot be opened. ``on_cancel`` is called with a function that ends the wait for the
        engine. Another thread may call this function.
        """
        self._lock = threading.Lock()
        """No thread holds this lock while it waits for an engine, so that ``close`` can end the process at any time."""
        self._is_closed = False
        self._process: _EngineProcess | None = None
        self._owned = contextlib.ExitStack()
        try:
            pools = []
            for memory in memories:
                file, layout = open_segment(memory.name), memory.layout
                self._owned.callback(os.close, file)
                pools.append(PoolFile(file, layout.first_block, layout.num_blocks, layout.block_bytes))
            self._setup = Setup(host, protocol, device, pools)
            on_cancel(self.close)
            self._launched().wait_until_started(START_LIMIT_S)
        except BaseException:
            self.close()
            raise

    def place(self) -> bytes:
        process = self._launched()
        place = process.wait_until_started(START_LIMIT_S)
        if process.replies():
            return place
        process.end()  # it was stopped, or has just ended
        return self._launched().wait_until_started(START_LIMIT_S)

    def read(self, place: bytes, pairs: Pairs) -> None:
        """Copies blocks from the pools at ``place`` into the pools of this node. A pair is (block there, own block).

        Raises TransferError if a block did not arrive, or if the engine does not start within ``START_WAIT_S``. With a
        longer wait, the sender would give up before this read ends. The start continues, so a later read may succeed.
        """
        begun = time.monotonic()
        process = self._launched()
        process.wait_until_started(START_WAIT_S)
        try:
            process.read(place, pairs, READ_LIMIT_S - (time.monotonic() - begun))
        except TransferError:
            process.end()
            with contextlib.suppress(TransferError):  # the next read reports the problem
                self._launched()
            raise

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.end()
            self._owned.close()

    def _launched(self) -> _EngineProcess:
        """Returns the process. If it has ended, launches a new one, whose engine may still start. Raises TransferError.
        """
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
        """Launches the process, and does not wait for its engine. Raises TransferError."""
        self._place, self._start_until = b"", time.monotonic() + START_LIMIT_S
        self._num_replies = 0
        self._starting, self._sending = threading.RLock(), threading.Lock()
        """Held while ``_control`` is used, so that no thread uses the socket after ``end`` has closed it."""
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_LIMIT_S)
        try:
            with other:
                inherited = (other.fileno(), *(pool.descriptor for pool in setup.pools))
                variables = with_module_path(environment(setup.protocol, setup.host))
                self._process = launch_python(MODULE, [str(other.fileno())], inherited, _STANDARD_ERROR, variables)
        except OSError as error:
            self._control.close()
            raise TransferError(f"the process of Mooncake could not be started: {error}") from error
        with contextlib.suppress(OSError):  # the process has ended, which ``wait_until_started`` notices
            self._control.send(encode(setup))

    @property
    def is_alive(self) -> bool:
        try:
            self._process.wait(timeout=0)
        except subprocess.TimeoutExpired:
            return True
        return False

    def wait_until_started(self, limit_s: float) -> bytes:
        """Waits until the engine runs. Returns its encoded ``Place``, at which other nodes read the pools.

        Raises TransferError if the engine does not run after ``limit_s`` seconds, or if its start has failed. In the
        second case, also ends the process.
        """
        if self._place:
            return self._place
        until = min(time.monotonic() + limit_s, self._start_until)
        if not self._starting.acquire(timeout=max(0.0, until - time.monotonic())):
            raise TransferError(STILL_STARTING)  # another thread waits for the engine, and notices a failed start
        try:
            if not self._place:
                self._control.settimeout(max(0.001, until - time.monotonic()))
                self._place = _place_of(self._control.recv(MAX_PACKET_BYTES))
            return self._place
        except TimeoutError as error:
            if time.monotonic() < self._start_until:
                raise TransferError(STILL_STARTING) from error
            self.end()
            raise TransferError(f"Mooncake did not start its engine within {START_LIMIT_S:.0f} s") from error
        except OSError as error:
            self.end()
            raise TransferError(f"the process of Mooncake did not start its engine: {error}") from error
        except TransferError:
            self.end()
            raise
        finally:
            self._starting.release()

    def replies(self) -> bool:
        """Returns True if the process still works: it replies to a test message, or completes a read meanwhile.

        Sends a second test message if the first one gets no reply, because a busy machine may delay a reply. If the
        result is False, the caller ends the process, and all its transfers fail.
        """
        before = self._num_replies
        for _ in range(2):
            with contextlib.suppress(TransferError):
                self.read(b"", (), REPLY_LIMIT_S)
                return True
        return self._num_replies != before and self.is_alive

    def read(self, place: bytes, pairs: Pairs, limit_s: float) -> None:
        """Reads blocks. Raises TransferError, also if this takes longer than ``limit_s`` seconds."""
        limit_s = max(0.001, limit_s)
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with own, other:
            own.settimeout(limit_s)
            try:
                with self._sending:
                    self._control.settimeout(limit_s)
                    socket.send_fds(self._control, [encode(Read(place, pack_pairs(pairs)))], [other.fileno()])
                other.close()  # now only the process has this end, so ``recv`` returns if the process ends
                reply = own.recv(MAX_PACKET_BYTES)
            except TimeoutError as error:
                raise TransferError(f"Mooncake did not end a transfer within {limit_s:.0f} s") from error
            except OSError as error:
                raise TransferError(f"the process of Mooncake has ended: {error}") from error
        if reply != DONE:
            raise TransferError(reply.decode(errors="replace") or "the process of Mooncake has ended")
        self._num_replies += 1

    def end(self) -> None:
        """Kills the process, and waits for its end. May be called again."""
        self._process.kill()
        self._process.wait()
        with self._starting, self._sending:
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
