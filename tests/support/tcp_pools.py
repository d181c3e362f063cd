"""Hand-over pools of fake replicas on several machines. A real transport over TCP connects them, and some transfers
fail.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Queue
from typing import Any

from llm_serving.errors import LLMServingError
from llm_serving.handover.one_sided import OneSidedCarrier
from llm_serving.handover.transport import FRAMES, Carrier, Done, Pairs, PoolReceiver, TcpTransport, TransferError
from support.handed_memory import HandedMemory
from support.local_reader import LocalReader, Places
from support.time_limits import time_limit

__all__ = ["TcpPools"]

SECRET = bytes(range(32))
TRANSFER_BYTES = 12
"""Size of the head of a transfer in bytes: the transfer's number and the number of blocks. The destinations follow."""


@dataclass
class _Waiting:
    """A transfer that has not run yet."""

    source: HandedMemory
    target: int
    pairs: Pairs
    done: Done


class TcpPools:
    """The pools of ``num_replicas`` machines. ``faults`` is the chance that a transfer is damaged or cut.

    A transfer runs when the test calls ``run``, in this thread. Call ``close`` at the end. With ``one_sided``, the
    receivers read the contents of blocks outside the connections. Flipped bits are then in contents.
    """

    is_shared = False

    def __init__(
        self,
        num_replicas: int,
        num_blocks: int,
        block_size: int,
        seed: int,
        *,
        faults: float = 0.0,
        one_sided: bool = False,
    ) -> None:
        salts: dict[int, bytes] = {}
        self._new_memory: Callable[[], HandedMemory] = lambda: HandedMemory(num_blocks, block_size, seed, salts)
        self.memories = [self._new_memory() for _ in range(num_replicas)]
        self.seen: Counter[str] = Counter()
        self._rng, self._faults = random.Random(seed), faults
        self._places: Places | None = {} if one_sided else None
        self._flips_next = False
        """True if a bit of the next block that is read must flip."""
        self._receivers = [self._receiver(memory) for memory in self.memories]
        self._transports: dict[tuple[int, int], TcpTransport] = {}
        self._waiting: list[_Waiting] = []
        self._last: list[_Waiting] = []
        """The last transfer of each machine."""
        self._listener = socket.create_server(("127.0.0.1", 0))

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def transport(self, source: int, target: int) -> _Queued:
        return _Queued(self.memories[source], target, self._waiting)

    def run(self) -> None:
        """Runs one of the waiting transfers to its end."""
        waiting = self._waiting.pop(self._rng.randrange(len(self._waiting)))
        key, fault = (id(waiting.source), waiting.target), ""
        if self._rng.random() < self._faults:
            fault = self._rng.choice(("flipped bit", "cut connection", "killed receiver"))
        transport = self._transports.get(key)
        if fault or transport is None or transport.is_closed:
            if transport is not None:
                transport.close()
            transport = self._connected(waiting, fault)
            self._transports[key] = transport
        self.seen[fault or "undisturbed"] += 1
        ended: Queue[LLMServingError | None] = Queue()
        transport.transfer(waiting.pairs, ended.put)
        error = ended.get(timeout=time_limit(30.0))
        self._flips_next = False
        if fault:
            transport.close()  # the next transfer has a socket without faults
        if fault == "killed receiver":
            self._receivers[waiting.target] = self._receiver(self.memories[waiting.target])
        self._last = [each for each in self._last if each.source is not waiting.source] + [waiting]
        waiting.done(error)

    def lose(self, index: int) -> None:
        """Ends the machine of a replica. The transfers from it fail.

        A failed transfer may still arrive later, as from a machine that was only frozen. If no transfer waited, the
        machine's last transfer may arrive a second time.
        """
        old = self.memories[index]
        self._receivers[index].close()
        self.memories[index] = self._new_memory()
        self.memories[index].num_bad = old.num_bad
        self._receivers[index] = self._receiver(self.memories[index])
        lost = [each for each in self._waiting if each.source is old]
        for waiting in lost:
            waiting.done(TransferError("the other machine was lost"))
            self._waiting.remove(waiting)
        for waiting in lost or [each for each in self._last if each.source is old]:
            if self._rng.random() < 0.5:
                self.seen["late transfers"] += 1
                self._waiting.append(_Waiting(old, waiting.target, waiting.pairs, lambda error: None))
        self._last = [each for each in self._last if each.source is not old]

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()
        for receiver in self._receivers:
            receiver.close()
        self._listener.close()

    def _carrier(self, memory: HandedMemory) -> Carrier:
        if self._places is None:
            return FRAMES

        def after_block(block: int) -> None:
            if self._flips_next:
                self._flips_next = False
                memory.flip(block)

        return OneSidedCarrier(LocalReader([memory], self._places, after_block))

    def _receiver(self, memory: HandedMemory) -> PoolReceiver:
        return PoolReceiver([memory], SECRET, self._carrier(memory))

    def _connected(self, waiting: _Waiting, fault: str) -> TcpTransport:
        receiver = self._receivers[waiting.target]
        if fault == "flipped bit" and self._places is not None:
            self._flips_next, fault = True, ""

        def connect() -> socket.socket:
            link = socket.create_connection(self._listener.getsockname())
            threading.Thread(target=receiver.serve, args=(self._listener.accept()[0],)).start()
            num_bytes = len(waiting.pairs) * (64 + waiting.source.blocks.shape[1])
            place = TRANSFER_BYTES + self._rng.randrange(num_bytes)
            return link if not fault else _FaultySocket(link, fault, place, receiver)  # type: ignore[return-value]

        return TcpTransport([waiting.source], connect, SECRET, self._carrier(waiting.source))


@dataclass
class _Queued:
    """The transport between two pools. Its transfers wait until ``TcpPools.run``."""

    source: HandedMemory
    target: int
    waiting: list[_Waiting]

    def transfer(self, pairs: Pairs, done: Done) -> None:
        self.waiting.append(_Waiting(self.source, self.target, pairs, done))

    def close(self) -> None:
        """Does nothing."""


class _FaultySocket(socket.socket):
    """A socket that spoils the first transfer at byte number ``place``."""

    def __init__(self, link: socket.socket, fault: str, place: int, receiver: PoolReceiver) -> None:
        super().__init__(link.family, link.type, link.proto, link.detach())
        self._fault, self._place, self._receiver = fault, place, receiver

    def sendmsg(self, parts: Sequence[memoryview], *more: Any) -> int:  # type: ignore[override]
        data = bytearray().join(parts)
        if self._fault == "flipped bit":
            data[self._place % len(data)] ^= 1 << self._place % 8
            self.sendall(data)
            return len(data)
        self.sendall(data[: self._place % len(data)])
        if self._fault == "killed receiver":
            self._receiver.close()
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)
        raise ConnectionError("the connection was cut")
