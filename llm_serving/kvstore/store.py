"""The KV tiers of one replica: host blocks with copies of computed blocks, and the slower tiers in folders.

The scheduler offers blocks that it has computed, so that the tiers can copy them. It also asks for the blocks of
waiting requests. ``BlockStore.exchange`` replies to these offers and questions. While a step or the mover copies a host
block, the block is held. Host blocks without holds are reused, the least recently used first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from llm_serving.block_moves.tier_moves import NO_HOST_BLOCK, BlockKey, WantedBlocks
from llm_serving.ipc.host_pool import HostPool
from llm_serving.kvstore.disk import DiskFigures, Transfer
from llm_serving.kvstore.host_blocks import DOUBTFUL, HostBlocks
from llm_serving.kvstore.kept import KeptBlocks
from llm_serving.kvstore.places import Place
from llm_serving.kvstore.tier_chain import BlockTier

MAX_OFFERS = 64
"""Maximum number of offered blocks that the store takes from the scheduler in one call."""
PATIENCE = 4.0
"""A request waits for a read at most this multiple of the time that computing its blocks would take. Then the blocks
are computed.
"""
MIN_PATIENCE_S = 0.2
"""Minimum seconds that a sequence waits for blocks from a tier before it computes them."""
_NEVER = float("inf")
"""Marks a transfer whose request no longer waits."""


class TierSource(Protocol):
    """The part of a scheduler that the tiers use. ``llm_serving.block_moves.tier_moves`` describes the methods."""

    def fresh_blocks(self, limit: int) -> list[BlockKey | None]: ...

    def store_blocks(self, hosts: Iterable[int]) -> None: ...

    def take_wanted(self) -> list[WantedBlocks]: ...

    def load_blocks(self, request_id: str, first: int, hosts: Iterable[int]) -> None: ...

    def take_released(self) -> list[tuple[int, bool]]: ...

    def distrust_blocks(self, now: float, *, recompute: bool) -> None: ...


@dataclass(slots=True)
class TierFigures:
    """Figures of the tiers of a replica. ``host_blocks`` and ``kept_blocks`` are present values; the other numbers
    count since the start.
    """

    host_blocks: int = 0
    """Host blocks that hold a copy of a block."""
    kept_blocks: int = 0
    """Host blocks that requests asked to keep."""
    stored: int = 0
    """Blocks that were copied from a device to host memory."""
    dropped: int = 0
    """Offered blocks that were evicted from the device before a copy could begin."""
    hits: dict[str, int] = field(default_factory=lambda: {"host": 0, "ssd": 0, "shared": 0})
    """Blocks of waiting requests that were found and used, by tier."""
    misses: int = 0
    """Blocks of waiting requests that were not found."""
    too_slow: int = 0
    """Blocks that were found on disk, but not read, because computing them takes less time."""
    expired: int = 0
    """Reads that took too long, so that the request's blocks were computed."""
    disk: DiskFigures | None = None
    """Figures of the SSD tier, which all replicas of the server share. None without an SSD tier."""
    shared: DiskFigures | None = None
    """Figures of the tier in a folder that several machines share. None without this tier."""


@dataclass(frozen=True, slots=True)
class Loan:
    """The right to read or write one block outside the engine thread.

    The block is a host block (``host``), which is not reused until the loan ends, or a record on the disk (``place``).
    """

    key: BlockKey
    pool: HostPool
    host: int | None
    """The host block. None if only the disk has the block."""
    place: Place | None
    epoch: int
    """Number of times that the replica had lost its agents when the loan began."""
    version: int
    """Value of ``BlockStore.version`` when the loan began."""


@dataclass(slots=True)
class _Waiting:
    """A request that waits for a read."""

    wanted: WantedBlocks
    hosts: list[int]
    """One host block for each found block, in order. Some of these host blocks already have the content. The disk tier
    fills the others.
    """
    transfer: Transfer
    due: float


class BlockStore:
    """The tiers of one replica. Only the engine thread calls the methods.

    ``first_host`` is the first of the ``num_hosts`` host blocks that belong to the tiers. ``disk`` is the tier behind
    host memory. ``wake`` wakes the engine thread; any thread may call it. With ``always_loads``, blocks are read from
    the disk even if it takes less time to compute them.
    """

    def __init__(
        self,
        first_host: int,
        num_hosts: int,
        disk: BlockTier | None,
        wake: Callable[[], None],
        *,
        always_loads: bool = False,
        max_kept: int = 0,
    ) -> None:
        """``max_kept``: maximum number of blocks that requests of one owner may keep in host memory."""
        self.figures = TierFigures()
        self.version = 0
        """A number that grows when the agents were lost or their blocks may be wrong. Blocks that were read at
        different versions must not be combined.
        """
        self._max_writes = max(1, num_hosts // 2)
        self._hosts = HostBlocks(first_host, num_hosts, KeptBlocks(num_hosts // 2, max_kept))
        self._disk = disk
        self.wake = wake
        """Wakes the engine thread. Any thread may call it."""
        self._always_loads = always_loads
        self._pool: HostPool | None = None
        self._epoch = 0
        self._num_doubts = 0
        """The value of ``BlockTier.num_doubts`` when this object last forgot all blocks because another machine
        distrusted some.
        """
        self._waiting: list[_Waiting] = []
        self._written: deque[tuple[int, int]] = deque()
        self._num_writes = 0
        self._unwritten: deque[int] = deque(maxlen=max(1, num_hosts))
        """Host blocks that must still be written to the disk, the oldest first.

        If the disk accepts no writes for a long time, the oldest elements are dropped.
        """
        if disk is not None:
            disk.when_changed(wake)

    def open(self, pool: HostPool) -> None:
        """Starts to use the host blocks ``pool``. Called when the agents have become ready."""
        self._pool = pool

    @property
    def pool(self) -> HostPool | None:
        """The host blocks. None while the agents are not ready. Any thread may read it."""
        return self._pool

    @property
    def is_usable(self) -> bool:
        """True if blocks may be copied between the host blocks and other places."""
        return self._pool is not None and bool(self._pool.is_usable)

    def lose(self, *, distrusted: bool = False) -> None:
        """Forgets all host blocks, because the agents were lost.

        With ``distrusted``, also removes the blocks that this server has written to the disk since its start, because
        the agents may have computed wrong values.
        """
        self._epoch += 1
        self.version += 1
        self._pool = None
        self._hosts.clear()
        self._waiting.clear()
        self._written.clear()
        self._unwritten.clear()
        self._num_writes = 0
        if distrusted:
            self.distrust()

    def distrust(self) -> None:
        """Forgets the contents of all host blocks, and removes the blocks that this server has written to the disk."""
        self.version += 1
        self._hosts.distrust()
        if self._disk is not None:
            self._disk.distrust()

    @property
    def next_due(self) -> float | None:
        """The time of the engine's clock at which a request stops waiting for a read from the disk. ``exchange`` must
        then be called. None if no read is in progress. Infinity if no request waits any more for the reads in progress.
        """
        return min((one.due for one in self._waiting), default=None)

    @property
    def has_news(self) -> bool:
        """True if ``exchange`` must be called, because a read has ended, or because another machine distrusts blocks
        that this server has read.
        """
        has_doubt = self._disk is not None and self._disk.num_doubts != self._num_doubts
        return has_doubt or any(one.transfer.done for one in self._waiting)

    def exchange(self, source: TierSource, now: float) -> bool:
        """Takes the blocks that the scheduler offers or asks for, and replies. Returns True if a waiting request may
        start now.

        This server may have read blocks from a shared folder that another machine now distrusts. Then first forgets all
        blocks.
        """
        if self._disk is not None and self._disk.num_doubts != self._num_doubts:
            self._num_doubts = self._disk.num_doubts
            self.distrust()
            source.distrust_blocks(now, recompute=True)
        if self._pool is None:
            replied = False
            for wanted in source.take_wanted():
                source.load_blocks(wanted.request_id, wanted.first, [])
                replied = True
            return replied
        self._hosts.expire(now)
        for host, ok in source.take_released():
            self._take_back(host, ok)
        self._end_writes()
        replied = self._end_reads(source, now)
        for wanted in source.take_wanted():
            replied = self._look_up(source, wanted, now) or replied
        self._take_offers(source)
        self._write_behind()
        self.figures.host_blocks = len(self._hosts.by_hash)
        self.figures.kept_blocks = self._hosts.num_kept
        return replied

    def keep(self, owner: str, hashes: Sequence[bytes], until: float) -> None:
        """Keeps the blocks with these hashes in host memory until a time of the engine's clock, within the limits.

        Blocks that are not in host memory yet are kept when they arrive.
        """
        self._hosts.keep(owner, hashes, until)
        self.figures.kept_blocks = self._hosts.num_kept

    # The following methods lend blocks to copies outside the engine.

    def lend(self, key: BlockKey) -> Loan | None:
        """Returns a loan of a block that host memory or the SSD has, or None. The caller must end the loan with
        ``end_loan``.
        """
        if self._pool is None or not self.is_usable:
            return None
        host = self._hosts.find(key)
        if host is not None:
            self._hosts.hold(host)
            return Loan(key, self._pool, host, None, self._epoch, self.version)
        place = None if self._disk is None else self._disk.find(key)
        if place is not None and place.segment.is_shared:
            return None  # the machines that share the folder find the block there
        return None if place is None else Loan(key, self._pool, None, place, self._epoch, self.version)

    def end_loan(self, loan: Loan) -> bool:
        """Ends a loan. Returns False if the content that was read may be wrong."""
        is_current = loan.version == self.version
        if loan.host is not None and loan.epoch == self._epoch:
            self._hosts.release(loan.host)
        return is_current

    @property
    def max_guests(self) -> int:
        """Maximum number of blocks that the import of a session may add. The limit leaves half of the host blocks for
        other requests.
        """
        return self._hosts.num_blocks // 2

    def accept(self, key: BlockKey) -> Loan | None:
        """Reserves a host block for the block ``key`` of an imported session, and returns its loan. The caller writes
        the content into the host block and then calls ``accepted``.

        Returns None if all host blocks are in use, or while the host blocks are not usable.
        """
        pool = self._pool if self.is_usable else None
        host = None if pool is None else self._hosts.allocate(key)
        return None if pool is None or host is None else Loan(key, pool, host, None, self._epoch, self.version)

    def accepted(self, loan: Loan, *, ok: bool) -> None:
        """Ends a loan from ``accept``. If ``ok`` is True, lookups find the content that the caller has written."""
        if loan.host is None or loan.epoch != self._epoch:
            return
        if ok and loan.version == self.version:
            self._hosts.filled(loan.host)
            if self._disk is not None:
                self._unwritten.append(loan.host)
        self._hosts.release(loan.host)

    # The following methods copy offered blocks to the host and to the disk.

    def _take_offers(self, source: TierSource) -> None:
        """Assigns a host block to each block that the scheduler offers, until no host block is available. The scheduler
        offers the remaining blocks again at the next ``exchange``.
        """
        while offers := source.fresh_blocks(MAX_OFFERS):
            replies: list[int] = []
            for key in offers:
                host = self._host_for(key)
                if host is None:
                    break
                replies.append(host)
            if replies:
                source.store_blocks(replies)
            if len(replies) < len(offers):
                return

    def _host_for(self, key: BlockKey | None) -> int | None:
        """Returns a host block for an offered block, or None if all host blocks are held. Returns ``NO_HOST_BLOCK`` if
        a tier already has the block, or if the offered block was evicted (``key`` is None).
        """
        if key is None:
            self.figures.dropped += 1
            return NO_HOST_BLOCK
        if key.chained_hash in self._hosts.by_hash or (self._disk is not None and self._disk.find(key) is not None):
            return NO_HOST_BLOCK
        return self._hosts.allocate(key)

    def _take_back(self, host: int, ok: bool) -> None:
        """Takes a host block back from the scheduler. If a step has just filled the block (``ok``), lookups find it,
        and it waits to be written to the disk.
        """
        key = self._hosts.keys.get(host)
        if key is None:
            return
        is_new = self._hosts.by_hash.get(key.chained_hash) != host
        if ok and is_new and key is not DOUBTFUL:
            self._hosts.filled(host)
            self.figures.stored += 1
            if self._disk is not None:
                self._unwritten.append(host)
        self._hosts.release(host)

    def _write_behind(self) -> None:
        """Asks the mover to write host blocks to the disk.

        At most half of the host blocks are being written at the same time, because these cannot be reused until their
        write ends. Blocks that wait for their write may be reused, and are then not written.
        """
        disk, pool, hosts = self._disk, self._pool, self._hosts
        if disk is None or pool is None or pool.is_usable is None or not disk.may_write:
            return
        while self._unwritten and self._num_writes < self._max_writes:
            host = self._unwritten.popleft()
            key = hosts.keys.get(host)
            if key is None or hosts.by_hash.get(key.chained_hash) != host or disk.find(key) is not None:
                continue
            self._num_writes += 1
            hosts.hold(host)
            disk.write(key, pool, host, partial(self._note_written, self._epoch, host))

    def _note_written(self, epoch: int, host: int) -> None:
        """Records the end of a write, and wakes the engine thread if more blocks wait for the disk. The mover calls it.
        """
        self._written.append((epoch, host))
        if self._unwritten:
            self.wake()

    def _end_writes(self) -> None:
        while self._written:
            epoch, host = self._written.popleft()
            if epoch == self._epoch:
                self._num_writes -= 1
                self._hosts.release(host)
        self._write_behind()

    # The following methods find blocks for waiting requests and load them.

    def _look_up(self, source: TierSource, wanted: WantedBlocks, now: float) -> bool:
        """Looks for the blocks that the scheduler wants, up to the first block that no tier has.

        If all blocks that were found are in host memory, replies to the scheduler and returns True. Otherwise starts to
        read the other blocks from the disk, and returns False: the reply follows after the read. Blocks are not read if
        reading takes longer than computing them, or if no host block is free.
        """
        hosts: list[int] = []
        transfer = Transfer([], [], [], [])
        for key in wanted.keys:
            host = self._hosts.find(key)
            if host is not None:
                self._hosts.hold(host)
            else:
                host = self._host_to_read(key, transfer)
                if host is None:
                    break
            hosts.append(host)
        self.figures.misses += len(wanted.keys) - len(hosts)
        if transfer.keys and not self._is_worth_it(wanted, transfer):
            self.figures.too_slow += len(transfer.keys)
            hosts = self._without_reads(hosts, transfer)
            transfer = Transfer([], [], [], [])
        if not transfer.keys:
            self.figures.hits["host"] += len(hosts)
            source.load_blocks(wanted.request_id, wanted.first, hosts)
            return True
        assert self._disk is not None
        assert self._pool is not None
        self._waiting.append(_Waiting(wanted, hosts, transfer, now + self._patience(wanted, transfer)))
        self._disk.read(transfer, self._pool, self.wake)
        return False

    def _host_to_read(self, key: BlockKey, transfer: Transfer) -> int | None:
        """Adds a block to ``transfer`` if the disk has it. Returns the host block that receives it. Returns None if the
        disk does not have the block, all host blocks are held, or they are not usable.
        """
        place = None if self._disk is None or not self.is_usable else self._disk.find(key)
        host = None if place is None else self._hosts.allocate(key)
        if place is None or host is None:
            return None
        transfer.keys.append(key)
        transfer.places.append(place)
        transfer.hosts.append(host)
        return host

    def _is_worth_it(self, wanted: WantedBlocks, transfer: Transfer) -> bool:
        """Returns True if reading the blocks takes less time than computing them, or if one of the times is unknown."""
        assert self._disk is not None
        if self._always_loads or wanted.max_block_s is None:
            return True
        reads = [*(one.transfer for one in self._waiting), transfer]
        seconds = self._disk.seconds_for([place for read in reads for place in read.places])
        return seconds is None or seconds < wanted.max_block_s * len(transfer.keys)

    def _patience(self, wanted: WantedBlocks, transfer: Transfer) -> float:
        block_s = wanted.max_block_s
        return 10 * MIN_PATIENCE_S if block_s is None else max(MIN_PATIENCE_S, PATIENCE * block_s * len(transfer.keys))

    def _without_reads(self, hosts: list[int], transfer: Transfer) -> list[int]:
        """Returns the host blocks before the first one that must be read from the disk. Releases the remaining ones."""
        end = hosts.index(transfer.hosts[0])
        for host in hosts[end:]:
            self._hosts.release(host)
        return hosts[:end]

    def _end_reads(self, source: TierSource, now: float) -> bool:
        """Replies to the scheduler for each read that has ended or takes too long. Returns True if there was a reply.
        """
        replied, waiting = False, self._waiting
        self._waiting = []
        for one in waiting:
            if one.transfer.done:
                self._end_read(source, one)
                replied = True
            elif now >= one.due:
                self.figures.expired += 1
                source.load_blocks(one.wanted.request_id, one.wanted.first, [])
                one.due = _NEVER
                self._waiting.append(one)
                replied = True
            else:
                self._waiting.append(one)
        return replied

    def _end_read(self, source: TierSource, one: _Waiting) -> None:
        """Processes a read that has ended. Lookups can then find the blocks. The scheduler gets all blocks before the
        first one that could not be read.
        """
        keys = self._hosts.keys
        oks = {h: ok and keys[h] is not DOUBTFUL for h, ok in zip(one.transfer.hosts, one.transfer.oks, strict=True)}
        for host, ok in oks.items():
            if ok:
                self._hosts.filled(host)
        oks |= {host: False for host in one.hosts if keys[host] is DOUBTFUL}  # also host blocks that needed no read
        end = next((place for place, host in enumerate(one.hosts) if not oks.get(host, True)), len(one.hosts))
        useful = one.hosts[:end] if one.due != _NEVER else []
        for host in one.hosts[len(useful) :]:
            self._hosts.release(host)
        if one.due == _NEVER:
            return  # the request stopped waiting earlier, and its prompt is computed
        tiers = {host: place.tier for host, place in zip(one.transfer.hosts, one.transfer.places, strict=True)}
        for host in useful:
            self.figures.hits[tiers.get(host, "host")] += 1
        self.figures.misses += len(one.hosts) - len(useful)
        source.load_blocks(one.wanted.request_id, one.wanted.first, useful)
