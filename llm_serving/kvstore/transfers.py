"""Reads and writes blocks of the KV tiers for coroutines on the event loop.

Each copy visits three threads. The engine thread finds the blocks and holds them. The mover copies the contents. The
engine thread then releases the blocks, and the caller gets the result. So no copy runs on the engine thread or on the
event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, takewhile
from typing import Generic, TypeVar

from llm_serving.block_moves.tier_moves import BlockKey
from llm_serving.ipc.host_pool import HostPool
from llm_serving.kvstore.mover import Mover
from llm_serving.kvstore.store import BlockStore, Loan
from llm_serving.kvstore.tier_chain import BlockTier

T = TypeVar("T")

Stores = Sequence[BlockStore]
"""The tiers of each replica. Empty if the engine has ended."""
UseStores = Callable[[Callable[[Stores], None]], None]
"""Calls a function in the engine thread with the tiers of all replicas. The function must not raise."""


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """The result of ``BlockTransfers.read``."""

    contents: list[bytes]
    """The contents of the blocks in order, up to the first block that no tier has."""
    versions: tuple[int, ...]
    """``BlockStore.version`` of each replica at the time of the read. Blocks of two reads with different versions must
    not be combined.
    """


class BlockTransfers:
    """Reads and writes blocks of the tiers. Call the methods on the event loop."""

    def __init__(self, use_stores: UseStores, mover: Mover, disk: BlockTier | None) -> None:
        self._use_stores = use_stores
        self._mover = mover
        self._disk = disk

    async def read(self, keys: Sequence[BlockKey]) -> ReadBlocks:
        """Returns the contents of the blocks in order, up to the first block that no tier has.

        If the agents are lost during the read, the result has no contents.
        """
        answer: _Answer[ReadBlocks] = _Answer()
        self._use_stores(lambda stores: self._lend(keys, answer, stores))
        return await answer.future

    async def write(self, keys: Sequence[BlockKey], contents: Sequence[bytes]) -> int:
        """Writes blocks into the host memory of each replica whose host blocks are usable. Returns the number of
        leading blocks that all these replicas have taken.

        Writing stops at the first content whose size differs from that of the agents' blocks.
        """
        answer: _Answer[int] = _Answer()
        self._use_stores(lambda stores: self._accept(keys, contents, answer, stores))
        return await answer.future

    async def max_guests(self) -> int:
        """Returns the maximum number of blocks that the import of a session may add."""
        answer: _Answer[int] = _Answer()
        self._use_stores(lambda stores: answer.set(min((one.max_guests for one in stores), default=0)))
        return await answer.future

    def keep(self, owner: str, hashes: Sequence[bytes], until: float) -> None:
        """Keeps the blocks with these chained hashes in host memory until the time ``until`` of the engine's clock."""

        def work(stores: Stores) -> None:
            for store in stores:
                store.keep(owner, hashes, until)

        self._use_stores(work)

    # The following methods do a read: first in the engine thread, then in the mover, then in the engine thread again.

    def _lend(self, keys: Sequence[BlockKey], answer: _Answer[ReadBlocks], stores: Stores) -> None:
        loans: list[tuple[BlockStore, Loan]] = []
        for key in keys:
            found = ((store, store.lend(key)) for store in stores)
            loan = next(((store, loan) for store, loan in found if loan is not None), None)
            if loan is None:
                break
            loans.append(loan)
        if not loans:
            answer.set(ReadBlocks([], tuple(store.version for store in stores)))
            return
        self._mover.submit(lambda: self._copy_out(loans, answer), urgent=True)

    def _copy_out(self, loans: list[tuple[BlockStore, Loan]], answer: _Answer[ReadBlocks]) -> None:
        contents: list[bytes] = []
        num_wanted = 0
        try:
            for pool, part in groupby((loan for _, loan in loans), _host_pool):
                wanted = list(part)
                num_wanted += len(wanted)
                found = self._from_disk(wanted) if pool is None else pool.read([_host(loan) for loan in wanted])
                contents += _with_size(found, wanted[0].pool)
                if len(contents) < num_wanted:
                    break
        finally:
            self._use_stores(partial(self._end_loans, loans, contents, answer))

    def _from_disk(self, loans: Sequence[Loan]) -> list[bytes]:
        """Returns the contents of the blocks on the disk, up to the first block that was removed or is damaged."""
        assert self._disk is not None
        contents: list[bytes] = []
        for loan in loans:
            assert loan.place is not None
            content = self._disk.content(loan.place, loan.key)
            if content is None:
                break
            contents.append(content)
        return contents

    def _end_loans(
        self,
        loans: list[tuple[BlockStore, Loan]],
        contents: list[bytes],
        answer: _Answer[ReadBlocks],
        stores: Stores,
    ) -> None:
        are_current = [store.end_loan(loan) for store, loan in loans]
        versions = tuple(store.version for store in stores)
        answer.set(ReadBlocks(contents if all(are_current) else [], versions))

    # The following methods do a write: first in the engine thread, then in the mover, then in the engine thread again.

    def _accept(
        self, keys: Sequence[BlockKey], contents: Sequence[bytes], answer: _Answer[int], stores: Stores
    ) -> None:
        accepted: list[tuple[BlockStore, list[Loan]]] = []
        for store in stores:
            if not store.is_usable:
                continue  # the replica has no agents now, or its node has other weights
            loans: list[Loan] = []
            for key in keys:
                loan = store.accept(key)
                if loan is None:
                    break
                loans.append(loan)
            accepted.append((store, loans))
        self._mover.submit(lambda: self._copy_in(accepted, contents, answer), urgent=True)

    def _copy_in(
        self, accepted: list[tuple[BlockStore, list[Loan]]], contents: Sequence[bytes], answer: _Answer[int]
    ) -> None:
        counts = [0] * len(accepted)
        try:
            for number, (_, loans) in enumerate(accepted):
                if loans:
                    pool = loans[0].pool  # one call of ``_accept`` has made all of these loans
                    chosen = _with_size(contents[: len(loans)], pool)
                    counts[number] = pool.write([_host(loan) for loan in loans[: len(chosen)]], chosen)
        finally:
            self._use_stores(lambda stores: self._end_writes(accepted, counts, answer))

    def _end_writes(
        self, accepted: list[tuple[BlockStore, list[Loan]]], counts: list[int], answer: _Answer[int]
    ) -> None:
        for (store, loans), count in zip(accepted, counts, strict=True):
            for place, loan in enumerate(loans):
                store.accepted(loan, ok=place < count)
        answer.set(min(counts, default=0))


def _host(loan: Loan) -> int:
    assert loan.host is not None
    return loan.host


def _host_pool(loan: Loan) -> HostPool | None:
    """Returns the pool of a loan's host block, or None if the block is on the disk."""
    return None if loan.host is None else loan.pool


def _with_size(contents: Sequence[bytes], pool: HostPool) -> list[bytes]:
    """Returns the contents before the first one whose size differs from that of the pool's blocks."""
    return list(takewhile(lambda content: len(content) == pool.block_bytes, contents))


class _Answer(Generic[T]):
    """The result of a read or a write. Another thread sets the result, and a task of the event loop waits for it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()

    def set(self, value: T) -> None:
        """Gives the result to the waiting task. Any thread may call this method."""
        with contextlib.suppress(RuntimeError):  # the event loop may be closed already
            self._loop.call_soon_threadsafe(self._set, value)

    def _set(self, value: T) -> None:
        if not self.future.done():
            self.future.set_result(value)
