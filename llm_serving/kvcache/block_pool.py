"""The pool of KV cache blocks: which are free, which are taken, how often. Ids only; the memory is the agent's."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

from llm_serving.kvcache.block_hash import TOKEN_BYTES
from llm_serving.kvcache.prefix_index import Parent, PrefixIndex

__all__ = ["NULL_BLOCK", "BlockPool"]

NULL_BLOCK = 0
"""Pads block tables. It is never given out, so that a padded entry can be read but belongs to nobody."""


class BlockPool:
    """Blocks ``1 .. num_blocks - 1``, each held by any number of holders. Whoever takes a hold gives it back, once.

    A free block may still be cached: its entry in ``index`` says what it holds, and ``share`` takes it again.
    Free blocks that are not cached are given out first, last in first out: they are still warm in the device's
    caches. Then cached ones, the least recently freed first; they are forgotten.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has none to give: block {NULL_BLOCK} is the null block")
        self.num_blocks = num_blocks
        self.index = PrefixIndex(num_blocks)
        self.num_holds = 0
        """Sum of the reference counts."""
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._free_cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones among them."""
        return len(self._free) + len(self._free_cached)

    @property
    def num_free_cached_blocks(self) -> int:
        return len(self._free_cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks; the caller has seen that so many are free."""
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
        """One more hold on each block: held ones, or free ones that are cached."""
        ref_counts = self._ref_counts
        for block in blocks:
            if not ref_counts[block]:
                if block not in self._free_cached:
                    raise AssertionError(f"block {block} is to be shared but nobody holds it, and it is not cached")
                del self._free_cached[block]
            ref_counts[block] += 1
        self.num_holds += len(blocks)

    def free(self, blocks: list[int]) -> None:
        """Give holds back, the last block first, so that the end of a prefix is evicted before its beginning.

        A block that is not taken (freed too often, never given out, null) is a bug.
        """
        ref_counts, entries = self._ref_counts, self.index.entries
        for block in reversed(blocks):
            count = ref_counts[block] - 1
            if count < 0:
                raise AssertionError(f"block {block} is given back but was not taken")
            ref_counts[block] = count
            if not count:
                if entries[block]:
                    self._free_cached[block] = None
                else:
                    self._free.append(block)
        self.num_holds -= len(blocks)

    def register(self, block: int, block_hash: bytes, content: bytes, parent: Parent) -> int:
        """A held block is full and holds ``content`` after ``parent``. Gives the block that is found from now on.

        Where an equal block is cached already, it is that one: the second stays private to its holder. Another
        block under the same hash (a collision, or one whose prefix is no longer cached) is forgotten.
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
        """A held block begins with ``content`` after ``parent`` and is not full: only ``find_tail`` finds it.

        Nothing to do where a cached block begins with the same.
        """
        index = self.index
        found = index.find_tail(parent, content)
        if found is not None and found[1] * TOKEN_BYTES == len(content):
            return
        if index.entries[block]:
            index.forget(block)
        index.add(block, content, parent)

    def drop_cached(self) -> None:
        """Forget what every block holds: the memory is gone. Holds stay."""
        for block, entry in enumerate(self.index.entries):
            if entry:
                self._forget(block)

    def snapshot(self) -> dict[str, Any]:
        """Returns the reference counts and both queues of free blocks. ``index`` is saved by the prefix cache."""
        return {"ref_counts": self._ref_counts.copy(), "free": self._free.copy(), "cached": list(self._free_cached)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what ``snapshot`` returned."""
        self._ref_counts, self._free = state["ref_counts"], state["free"]
        self._free_cached = OrderedDict.fromkeys(state["cached"])
        self.num_holds = sum(self._ref_counts)

    def check_integrity(self, held: list[int]) -> None:
        """Raises AssertionError unless ``held`` (a block once for each hold) and the free blocks are all there is.

        Costs in proportion to what is held.
        """
        counts = Counter(held)
        if len(counts) + self.num_free_blocks != self.num_usable_blocks:
            raise AssertionError(
                f"{len(counts)} blocks held and {self.num_free_blocks} free do not make {self.num_usable_blocks}"
            )
        wrong = [block for block, count in counts.items() if self._ref_counts[block] != count]
        if wrong or len(held) != self.num_holds:
            raise AssertionError(
                f"{self.num_holds} holds are counted, there are {len(held)}; counts differ for {sorted(wrong)}"
            )
        if self._ref_counts[NULL_BLOCK]:
            raise AssertionError("the null block is held")

    def check_queues(self) -> None:
        """Raises AssertionError unless every block is where its count and its entry say. Looks at every block."""
        free = [*self._free, *self._free_cached]
        if sorted(free) != [block for block in range(1, self.num_blocks) if not self._ref_counts[block]]:
            raise AssertionError(f"free are {sorted(free)}, which is not all that nobody holds, each once")
        entries = self.index.entries
        wrong = [block for block in self._free if entries[block]]
        wrong += [block for block in self._free_cached if not entries[block]]
        if wrong:
            raise AssertionError(f"free blocks {wrong} are in the wrong queue")
        self.index.check_integrity()

    def _evict(self, count: int, wanted: int) -> None:
        """Forget the ``count`` cached free blocks that have been free for longest."""
        if count > len(self._free_cached):
            raise AssertionError(f"{wanted} blocks asked for, {self.num_free_blocks} are free")
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
