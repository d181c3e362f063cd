"""The pool of KV cache blocks with their reference counts, and the copies of blocks that steps in flight make.

The pool manages block ids. The agent owns the memory of the blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from llm_serving.kvcache.block_hash import TOKEN_BYTES
from llm_serving.kvcache.prefix_index import Parent, PrefixIndex

NULL_BLOCK = 0
"""Block id that pads block tables. No sequence gets this block, so a step may read or write it without harm."""


class BlockPool:
    """Blocks ``1 .. num_blocks - 1`` with reference counts. A block is free when each of its holders has freed it.

    A free block may still be cached. Then its entry in ``index`` describes its content, and ``share`` can take the
    block again. ``allocate`` first takes free blocks that are not cached. It starts with the block that was freed last,
    because this block may still be in the device's caches. If more blocks are needed, ``allocate`` evicts cached
    blocks. The cached block that was freed first is evicted first.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks is {num_blocks}; it must be at least 2 (block {NULL_BLOCK} is the null block)"
            )
        self.num_blocks = num_blocks
        self.index = PrefixIndex(num_blocks)
        self.num_holds = 0
        """Sum of all reference counts."""
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._free_cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that nothing holds. Free blocks that are still cached count, too."""
        return len(self._free) + len(self._free_cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Returns ``count`` blocks. The caller must have checked that this number of blocks is free."""
        if count > len(self._free):
            self._evict(count - len(self._free), count)
        start = len(self._free) - count
        blocks = self._free[start:]
        del self._free[start:]
        blocks.reverse()
        ref_counts = self._ref_counts
        for block in blocks:
            ref_counts[block] = 1
        self.num_holds += count
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Adds a hold to each block. Each block must be held already, or be free and cached."""
        ref_counts = self._ref_counts
        for block in blocks:
            if not ref_counts[block]:
                if block not in self._free_cached:
                    raise AssertionError(f"block {block} is shared but neither held nor cached")
                del self._free_cached[block]
            ref_counts[block] += 1
        self.num_holds += len(blocks)

    def free(self, blocks: list[int]) -> None:
        """Removes a hold from each block, from the last block to the first. So the end of a prefix is evicted before
        its beginning.

        Raises AssertionError for a block that is not held.
        """
        ref_counts, entries = self._ref_counts, self.index.entries
        for block in reversed(blocks):
            count = ref_counts[block] - 1
            if count < 0:
                raise AssertionError(f"block {block} is freed but not allocated")
            ref_counts[block] = count
            if not count:
                if entries[block]:
                    self._free_cached[block] = None
                else:
                    self._free.append(block)
        self.num_holds -= len(blocks)

    def register(self, block: int, block_hash: bytes, content: bytes, parent: Parent) -> int:
        """Adds a held full block to the prefix cache. ``content`` has its tokens, ``parent`` is the index entry of the
        block before it.

        Returns the block that lookups find from now on: normally ``block``. If another cached block already has the
        same content and parent, returns that block, and ``block`` is not cached.

        If a cached block has the same hash but another content or parent, ``block`` replaces it in the prefix cache.
        There are two possible causes: a hash collision, or the parent of the replaced block has left the prefix cache.
        """
        index = self.index
        other = index.block_of(block_hash)
        if other is not None:
            if index.holds(other, content, parent):
                return other
            self._forget(other)
        if index.entries[block]:
            index.forget(block)
        index.add(block, content, parent, block_hash)
        return block

    def register_tail(self, block: int, content: bytes, parent: Parent) -> None:
        """Adds a held block that is not full to the prefix cache. ``content`` has its tokens, ``parent`` is the index
        entry of the block before it.

        ``PrefixIndex.find_tail`` can then find the block. If a cached block with the same parent already begins with
        this content, the new block is not added.
        """
        index = self.index
        found = index.find_tail(parent, content)
        if found is not None and found[1] * TOKEN_BYTES == len(content):
            return
        if index.entries[block]:
            index.forget(block)
        index.add(block, content, parent)

    def drop_cached(self) -> None:
        """Removes all blocks from the prefix cache, because the device's memory was lost.

        Reference counts do not change.
        """
        # The observer gets one call of ``cleared`` at the end instead of a call of ``removed`` for each block.
        observer, self.index.observer = self.index.observer, None
        for block, entry in enumerate(self.index.entries):
            if entry:
                self._forget(block)
        self.index.observer = observer
        if observer is not None:
            observer.cleared()

    def snapshot(self) -> dict[str, Any]:
        """Returns the reference counts, the free blocks that are not cached, and the free blocks that are cached.

        ``PrefixCache.snapshot`` saves the state of ``index``.
        """
        return {"ref_counts": self._ref_counts.copy(), "free": self._free.copy(), "cached": list(self._free_cached)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the state that ``snapshot`` returned."""
        self._ref_counts, self._free = state["ref_counts"], state["free"]
        self._free_cached = OrderedDict.fromkeys(state["cached"])
        self.num_holds = sum(self._ref_counts)

    def check_integrity(self, held: list[int]) -> None:
        """Raises AssertionError unless each usable block is either held or free.

        ``held`` lists each held block once per hold. The cost is proportional to the number of holds.
        """
        counts = Counter(held)
        if len(counts) + self.num_free_blocks != self.num_usable_blocks:
            raise AssertionError(
                f"{len(counts)} blocks held and {self.num_free_blocks} free are not {self.num_usable_blocks} in total"
            )
        wrong = [block for block, count in counts.items() if self._ref_counts[block] != count]
        if wrong or len(held) != self.num_holds:
            raise AssertionError(
                f"{self.num_holds} holds are counted, but there are {len(held)}; counts differ for {sorted(wrong)}"
            )
        if self._ref_counts[NULL_BLOCK]:
            raise AssertionError("the null block is held")

    def _evict(self, count: int, wanted: int) -> None:
        """Evicts the ``count`` cached blocks that have been free for the longest time.

        ``wanted`` is the number of blocks to allocate, for the error message.
        """
        if count > len(self._free_cached):
            raise AssertionError(f"{wanted} blocks are requested, {self.num_free_blocks} are free")
        forget, pop = self.index.forget, self._free_cached.popitem
        evicted = []
        for _ in range(count):
            block, _ = pop(last=False)
            forget(block)
            evicted.append(block)
        evicted.reverse()
        self._free[:0] = evicted

    def _forget(self, block: int) -> None:
        self.index.forget(block)
        if not self._ref_counts[block]:
            del self._free_cached[block]
            self._free.append(block)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy of block ``source`` to the new block ``destination`` of a sequence's block table.

    The copy itself holds the source block until it ends. So no sequence can get and overwrite this block during the
    copy, even if all other holders free it.
    """

    source: int
    destination: int


class BlockCopies:
    """The copies of blocks that steps in flight make. Holds their source blocks until the copies have completed."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._sources: Counter[int] = Counter()
        self.num_under_way = 0
        """Number of copies that have begun and not ended."""

    def begin(self, source: int) -> BlockCopy:
        """Begins a copy of block ``source``. Allocates the destination block, and holds the source until ``end``.

        The source must be held or cached. If it is cached but not held, it counts as a free block. The caller must then
        have checked that at least two blocks are free.
        """
        self._pool.share([source])
        self._sources[source] += 1
        self.num_under_way += 1
        return BlockCopy(source, self._pool.allocate(1)[0])

    def end(self, copies: Iterable[BlockCopy]) -> None:
        """Removes the hold on the source of each copy. The copies have completed or will never run."""
        for copy in copies:
            count = self._sources.pop(copy.source, 0) - 1
            if count < 0:
                raise AssertionError(f"the copy of block {copy.source} to {copy.destination} has ended already")
            if count:
                self._sources[copy.source] = count
            self.num_under_way -= 1
            self._pool.free([copy.source])

    def sources(self) -> list[int]:
        """Returns the source blocks of all copies under way. A block with several copies occurs several times."""
        return list(self._sources.elements())

    def restore(self, sources: list[int]) -> None:
        """Restores the list that ``sources`` returned.

        The pool's reference counts already include the holds of these copies.
        """
        self._sources = Counter(sources)
        self.num_under_way = len(sources)
