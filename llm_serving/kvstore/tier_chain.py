"""Joins two tiers in folders to one: first the SSD, then the folder that several machines share.

Each tier has its own mover (thread for input and output). So a network that does not respond never delays the SSD.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from llm_serving.block_moves.tier_moves import BlockKey
from llm_serving.ipc.host_pool import HostPool
from llm_serving.kvstore.disk import FileTier, Transfer
from llm_serving.kvstore.places import Place


class BlockTier(Protocol):
    """The interface of a tier in a folder for ``BlockStore``. ``FileTier`` in ``disk.py`` describes the methods."""

    @property
    def may_write(self) -> bool: ...

    @property
    def num_doubts(self) -> int: ...

    def when_changed(self, call: Callable[[], None]) -> None: ...

    def find(self, key: BlockKey) -> Place | None: ...

    def seconds_for(self, places: Sequence[Place]) -> float | None: ...

    def write(self, key: BlockKey, pool: HostPool, host: int, done: Callable[[], None]) -> None: ...

    def read(self, transfer: Transfer, pool: HostPool, done: Callable[[], None]) -> None: ...

    def content(self, place: Place, key: BlockKey) -> bytes | None: ...

    def distrust(self) -> None: ...


class TierChain:
    """Looks for blocks in the first tier, then in the second one, and writes blocks to both."""

    def __init__(self, first: FileTier, second: FileTier) -> None:
        self._first, self._second = first, second

    @property
    def may_write(self) -> bool:
        """True if one of the tiers accepts blocks now."""
        return self._first.may_write or self._second.may_write

    @property
    def num_doubts(self) -> int:
        """Number of times that another machine distrusted blocks which this server had read. See ``FileTier``."""
        return self._first.num_doubts + self._second.num_doubts

    def when_changed(self, call: Callable[[], None]) -> None:
        """Registers a function that a tier's mover calls when that tier was opened, or has raised ``num_doubts``."""
        for tier in self._tiers:
            tier.when_changed(call)

    def find(self, key: BlockKey) -> Place | None:
        """Returns the place of a block in the first tier that has it, or None."""
        found = self._first.find(key)
        return self._second.find(key) if found is None else found

    def seconds_for(self, places: Sequence[Place]) -> float | None:
        """Returns the expected seconds of a read, or None while the bandwidth of one of the needed tiers is unknown.

        Both tiers read at the same time, so this is the longer of the two times.
        """
        parts = [(tier, [place for place in places if self._of(place) is tier]) for tier in self._tiers]
        times = [tier.seconds_for(part) for tier, part in parts if part]
        known = [seconds for seconds in times if seconds is not None]
        return max(known, default=0.0) if len(known) == len(times) else None

    def write(self, key: BlockKey, pool: HostPool, host: int, done: Callable[[], None]) -> None:
        """Writes a block to both tiers. Calls ``done`` when both writes have ended."""
        ended = _Countdown(2, done)
        for tier in self._tiers:
            if tier.may_write and tier.find(key) is None:
                tier.write(key, pool, host, ended)
            else:
                ended()

    def read(self, transfer: Transfer, pool: HostPool, done: Callable[[], None]) -> None:
        """Reads blocks from both tiers at the same time. Calls ``done`` when both reads have ended."""
        owners = [self._of(place) for place in transfer.places]
        parts = [(tier, _part(transfer, [owner is tier for owner in owners])) for tier in self._tiers]
        ended = _Countdown(2, lambda: _join(transfer, [part for _, part in parts], done))
        for tier, part in parts:
            if part.keys:
                tier.read(part, pool, ended)
            else:
                ended()

    def content(self, place: Place, key: BlockKey) -> bytes | None:
        """Returns the content of a block, or None. The mover of any tier may call it."""
        return self._of(place).content(place, key)

    def distrust(self) -> None:
        """Removes all blocks that this server has written since its start. See ``FileTier``."""
        for tier in self._tiers:
            tier.distrust()

    @property
    def _tiers(self) -> tuple[FileTier, FileTier]:
        return self._first, self._second

    def _of(self, place: Place) -> FileTier:
        return self._second if place.segment.is_shared else self._first


class _Countdown:
    """An object that calls ``done`` when it has been called ``number`` times. Any thread may call it."""

    def __init__(self, number: int, done: Callable[[], None]) -> None:
        self._left = number
        self._done = done
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._done()


def _part(transfer: Transfer, chosen: Sequence[bool]) -> Transfer:
    """Returns the part of a read for one tier: the blocks for which ``chosen`` is True."""
    rows = [row for row, is_chosen in zip(_rows(transfer), chosen, strict=True) if is_chosen]
    return Transfer([key for key, _, _ in rows], [place for _, place, _ in rows], [host for _, _, host in rows], [])


def _rows(transfer: Transfer) -> list[tuple[BlockKey, Place, int]]:
    return list(zip(transfer.keys, transfer.places, transfer.hosts, strict=True))


def _join(transfer: Transfer, parts: Sequence[Transfer], done: Callable[[], None]) -> None:
    """Combines the results of both tiers into ``transfer``, and calls ``done``."""
    oks = {host: ok for part in parts for host, ok in zip(part.hosts, part.oks, strict=True)}
    transfer.oks += [oks[host] for host in transfer.hosts]
    transfer.done = True
    done()
