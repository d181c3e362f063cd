"""Runs Mooncake's engine. Only the process ``llm_serving.handover.mooncake`` uses this module."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec

from llm_serving.handover.mooncake.library import ASCEND, LIBRARIES, problem_with
from llm_serving.handover.mooncake.messages import (
    DONE,
    MAX_PACKET_BYTES,
    Place,
    PoolFile,
    Read,
    Setup,
    Started,
    decode_place,
    decode_read,
    decode_setup,
    encode,
)

_NO_METADATA_SERVER = "P2PHANDSHAKE"
"""Value of Mooncake's setting for a metadata server. With this value, engines need no metadata server, because they ask
each other for memory addresses.
"""


class EngineError(Exception):
    """Mooncake cannot be used, or a read has failed."""


class Engine:
    """Mooncake's engine with the registered pools of a node."""

    def __init__(self, setup: Setup) -> None:
        """Maps the pools, starts the engine and registers the pools. Raises EngineError and OSError."""
        self._pools = setup.pools
        self._mappings = [_mapped(pool) for pool in setup.pools]
        self._addresses = [ctypes.addressof(ctypes.c_char.from_buffer(mapping)) for mapping in self._mappings]
        self._library = _transfer_engine(setup)
        sizes = [len(mapping) for mapping in self._mappings]
        if self._library.batch_register_memory(self._addresses, sizes) != 0:
            raise EngineError(f"Mooncake could not register {len(sizes)} pools of {sizes[0]} bytes")
        host = f"[{setup.host}]" if ":" in setup.host else setup.host
        self.place = Place(f"{host}:{self._library.get_rpc_port()}", self._addresses)

    def read(self, message: Read) -> None:
        """Reads blocks from another engine. Returns when all blocks have arrived. Raises EngineError otherwise."""
        if not message.packed_pairs:
            return
        place = decode_place(message.place)
        if len(place.addresses) != len(self._pools):
            raise EngineError(f"the sender has {len(place.addresses)} pools; this node has {len(self._pools)}")
        own, remote, sizes = [], [], []
        for pool, address, there in zip(self._pools, self._addresses, place.addresses, strict=True):
            for source, target in message.pairs:
                if target >= pool.num_blocks:
                    raise EngineError(f"block {target} is not in the pool of {pool.num_blocks} blocks")
                own.append(address + target * pool.block_bytes)
                remote.append(there + source * pool.block_bytes)
                sizes.append(pool.block_bytes)
        result = self._library.batch_transfer_sync_read(place.engine, own, remote, sizes)
        if result != 0:
            raise EngineError(f"Mooncake could not read {len(sizes)} blocks from {place.engine} (result {result})")


def serve(control: socket.socket) -> NoReturn:
    """Starts the engine and serves the node until it closes ``control``. Then ends the process."""
    try:
        setup = decode_setup(control.recv(MAX_PACKET_BYTES))
        with _ends_with(control):
            engine = Engine(setup)
    except (EngineError, OSError, msgspec.DecodeError) as error:
        with contextlib.suppress(OSError):  # the node may have ended
            control.send(encode(Started(None, str(error))))
        os._exit(1)
    with contextlib.suppress(OSError):
        control.send(encode(Started(engine.place)))
        _serve_reads(engine, control)
    os._exit(0)  # does not wait for threads, because a thread of Mooncake may hang


def _serve_reads(engine: Engine, control: socket.socket) -> None:
    while True:
        packet, descriptors, _, _ = socket.recv_fds(control, MAX_PACKET_BYTES, 1)
        if not packet:
            return
        reply = socket.socket(fileno=descriptors[0])
        threading.Thread(target=_answer, args=(engine, packet, reply), daemon=True).start()


@contextlib.contextmanager
def _ends_with(control: socket.socket) -> Iterator[None]:
    """In this context, the signal SIGIO ends the process if the node closes ``control``, even if Mooncake hangs.

    PR_SET_PDEATHSIG is no alternative. It sends the signal when the thread that started this process ends, even if the
    node continues to run.
    """
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC)
    with contextlib.suppress(BlockingIOError):
        if not control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):  # closed before O_ASYNC had an effect
            os._exit(1)
    try:
        yield
    finally:
        fcntl.fcntl(control, fcntl.F_SETFL, flags)


def _answer(engine: Engine, packet: bytes, reply: socket.socket) -> None:
    with reply, contextlib.suppress(OSError):  # the node may have given up
        try:
            engine.read(decode_read(packet))
        except (EngineError, msgspec.DecodeError) as error:
            reply.send(str(error).encode())
        else:
            reply.send(DONE)


def _mapped(pool: PoolFile) -> mmap.mmap:
    return mmap.mmap(pool.descriptor, pool.num_blocks * pool.block_bytes, offset=pool.first_byte)


def _transfer_engine(setup: Setup) -> Any:
    """Returns Mooncake's ``TransferEngine``, which listens on all addresses. Raises EngineError."""
    if (problem := problem_with(setup.protocol)) is not None:
        raise EngineError(problem)
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise EngineError(f"Mooncake cannot be loaded: {error}. On Debian, it needs {LIBRARIES}") from error
    if setup.protocol == ASCEND:
        _choose_ascend(int(setup.device or "0"))
    library, device = TransferEngine(), "" if setup.protocol == ASCEND else setup.device
    result = library.initialize(setup.host, _NO_METADATA_SERVER, setup.protocol, device)
    if result != 0:
        raise EngineError(f"Mooncake could not start with protocol {setup.protocol} at {setup.host} (result {result})")
    return library


def _choose_ascend(number: int) -> None:
    """Makes the Ascend device ``number`` the one whose network links Mooncake uses. Raises EngineError."""
    try:
        import acl
    except ImportError as error:
        raise EngineError(f"protocol ascend needs pyACL of CANN: {error}; source set_env.sh of CANN") from error
    for name, result in (("acl.init", acl.init()), ("acl.rt.set_device", acl.rt.set_device(number))):
        if result != 0:
            raise EngineError(f"{name} failed for Ascend {number} (result {result})")
