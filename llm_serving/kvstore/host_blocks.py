"""Manages the host blocks of a replica that belong to the KV tiers: contents, holds, and which block is reused next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from llm_serving.block_moves.tier_moves import BlockKey
from llm_serving.kvstore.kept import KeptBlocks

DOUBTFUL = BlockKey(b"", b"")
"""The content key of a held host block whose content may be wrong. No lookup finds it."""


class HostBlocks:
    """The host blocks ``first .. first + num_blocks - 1`` with their contents.

    A block that has a content but no holds can be reused for another content. It is *parked* if a request asked to keep
    its content, and *idle* otherwise. Idle blocks are reused before parked blocks.
    """

    def __init__(self, first: int, num_blocks: int, kept: KeptBlocks) -> None:
        self._first, self.num_blocks = first, num_blocks
        self._kept = kept
        self.clear()

    def clear(self) -> None:
        self.by_hash: dict[bytes, int] = {}
        self.keys: dict[int, BlockKey] = {}
        """The content key of each host block that has a content or gets one from a copy in progress."""
        self._free = list(range(self._first + self.num_blocks - 1, self._first - 1, -1))
        self._holds: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._parked: OrderedDict[int, None] = OrderedDict()

    def find(self, key: BlockKey) -> int | None:
        """Returns the host block with this content, or None. Compares the tokens as well as the hash."""
        host = self.by_hash.get(key.chained_hash)
        return host if host is not None and self.keys[host] == key else None

    def allocate(self, key: BlockKey) -> int | None:
        """Returns a host block for a new content and holds it for the caller. Returns None if all host blocks are held.
        """
        if self._free:
            host = self._free.pop()
        elif self._idle:
            host, _ = self._idle.popitem(last=False)
            self._forget(host)
        elif self._parked:
            host, _ = self._parked.popitem(last=False)
            self._forget(host)
        else:
            return None
        self.keys[host] = key
        self._holds[host] = 1
        return host

    def filled(self, host: int) -> None:
        """Lets lookups find the content of a host block, which has been copied completely. If another host block has
        the same content, lookups find that block.
        """
        key = self.keys[host]
        if key is not DOUBTFUL:
            self.by_hash.setdefault(key.chained_hash, host)

    def distrust(self) -> None:
        """Marks the contents of all host blocks as unknown, so that lookups find none."""
        self.by_hash.clear()
        for host in (*self._idle, *self._parked):
            del self.keys[host]
            self._free.append(host)
        self._idle.clear()
        self._parked.clear()
        self.keys = dict.fromkeys(self.keys, DOUBTFUL)

    def hold(self, host: int) -> None:
        self._holds[host] = self._holds.get(host, 0) + 1
        self._idle.pop(host, None)
        self._parked.pop(host, None)

    def release(self, host: int) -> None:
        """Removes a hold of a block.

        Without holds, a block whose content lookups cannot find becomes free. Any other block becomes parked if a
        request asked to keep its content, or else idle.
        """
        self._holds[host] -= 1
        if self._holds[host]:
            return
        del self._holds[host]
        chained_hash = self.keys[host].chained_hash
        if self.by_hash.get(chained_hash) == host:
            (self._parked if chained_hash in self._kept else self._idle)[host] = None
        else:
            del self.keys[host]
            self._free.append(host)

    @property
    def num_kept(self) -> int:
        """Number of blocks without holds whose content requests asked to keep."""
        return len(self._parked)

    def keep(self, owner: str, hashes: Iterable[bytes], until: float) -> None:
        """Keeps the blocks with these hashes for ``owner`` until the time ``until``. Their host blocks are reused only
        after all idle blocks.
        """
        for each in self._kept.keep(owner, hashes, until):
            host = self.by_hash.get(each)
            if host is not None and host in self._idle:
                del self._idle[host]
                self._parked[host] = None

    def expire(self, now: float) -> None:
        """Makes kept blocks idle if their time is over at ``now``. These blocks are then reused first."""
        if now < self._kept.next_end:
            return
        for each in self._kept.expire(now):
            host = self.by_hash.get(each)
            if host is not None and host in self._parked:
                del self._parked[host]
                self._idle[host] = None
                self._idle.move_to_end(host, last=False)

    def _forget(self, host: int) -> None:
        del self.by_hash[self.keys.pop(host).chained_hash]
