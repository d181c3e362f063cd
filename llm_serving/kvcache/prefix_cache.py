"""The prefix cache: which blocks hold the beginning of a sequence already, and which will soon.

A block is *announced* while a step in flight computes it, and *committed* when that step was answered: then it is
cached, whoever holds it. It stays so while it is free, until it is given out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llm_serving.kvcache.block_hash import BlockHash, root_hash
from llm_serving.kvcache.block_pool import BlockPool
from llm_serving.kvcache.prefix_chain import PrefixChain
from llm_serving.kvcache.prefix_index import Parent

__all__ = ["PrefixCache", "PrefixMatch", "TailMatch"]


@dataclass(frozen=True, slots=True)
class TailMatch:
    """A cached block of which the first ``num_tokens`` tokens continue the prefix. To be copied, not shared."""

    block: int
    entry: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What was cached of a sequence when it was asked. It holds nothing: ``adopt`` sees what is left of it."""

    blocks: list[int]
    """Full blocks, from the first."""
    entries: list[int]
    num_tokens: int
    """Tokens in ``blocks`` and ``tail``; less than the sequence has, so that one is left to be computed."""
    tail: TailMatch | None
    num_pending_tokens: int
    """Tokens in the full blocks after ``blocks`` that steps in flight compute: who waits finds so many more."""

    @property
    def pending(self) -> bool:
        return self.num_pending_tokens > 0


class PrefixCache:
    """Matches sequences with the blocks of ``pool``."""

    def __init__(self, pool: BlockPool, block_size: int, namespace: bytes, block_hash: BlockHash) -> None:
        self.epoch = 0
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self._pool = pool
        self._index = pool.index
        self._block_size = block_size
        self._namespace = namespace
        self._block_hash = block_hash
        self._announced: dict[bytes, int] = {}

    def new_chain(self, token_ids: Sequence[int], salt: bytes) -> PrefixChain:
        root = root_hash(self._namespace, salt, self._block_hash)
        chain = PrefixChain(token_ids, self._block_size, salt=salt, root=root, block_hash=self._block_hash)
        chain.epoch = self.epoch
        return chain

    def match(self, chain: PrefixChain) -> PrefixMatch:
        size, usable = self._block_size, chain.num_tokens - 1
        blocks: list[int] = []
        entries: list[int] = []
        parent: Parent = chain.salt
        for index in range(usable // size):
            block = self._index.find(chain.hash_at(index), chain.content(index), parent)
            if block is None:
                break
            parent = self._index.entries[block]
            blocks.append(block)
            entries.append(parent)
        start = len(blocks) * size
        tail = self._match_tail(parent, chain.tokens(start, min(start + size, usable)))
        num_tokens = start + (tail.num_tokens if tail is not None else 0)
        return PrefixMatch(blocks, entries, num_tokens, tail, self._num_pending_tokens(chain, len(blocks)))

    def announce(self, chain: PrefixChain, end: int) -> None:
        """A step that computes the tokens before ``end`` is about to run."""
        for index in range(chain.num_announced, end // self._block_size):
            block_hash = chain.hash_at(index)
            self._announced[block_hash] = self._announced.get(block_hash, 0) + 1
            chain.num_announced = index + 1

    def withdraw(self, chain: PrefixChain) -> None:
        """What is announced and not committed will not be."""
        num_committed = len(chain.entries)
        for index in range(num_committed, chain.num_announced):
            self._take_announcement_back(chain.hash_at(index))
        chain.num_announced = num_committed

    def commit(self, block_table: list[int], chain: PrefixChain, num_computed: int) -> None:
        """The first ``num_computed`` tokens of the chain are in the blocks of the table."""
        if chain.epoch != self.epoch:
            return
        pool, entries, size = self._pool, chain.entries, self._block_size
        parent: Parent = entries[-1] if entries else chain.salt
        for index in range(len(entries), num_computed // size):
            block_hash = chain.hash_at(index)
            if index < chain.num_announced:
                self._take_announcement_back(block_hash)
            parent = pool.register(block_table[index], block_hash, chain.content(index), parent)
            entries.append(parent)
        chain.num_announced = max(chain.num_announced, len(entries))
        start = len(entries) * size
        if start < num_computed:
            pool.register_tail(block_table[len(entries)], chain.tokens(start, num_computed), parent)

    def current_part(self, match: PrefixMatch) -> tuple[list[int], TailMatch | None]:
        """What of a match still holds what it held: its first blocks, and the tail if all of them do."""
        entries_now = self._index.entries
        for index, (block, entry) in enumerate(zip(match.blocks, match.entries, strict=True)):
            if entries_now[block] != entry:
                return match.blocks[:index], None
        tail = match.tail
        return match.blocks, tail if tail is not None and entries_now[tail.block] == tail.entry else None

    def begin(self, chain: PrefixChain, entries: list[int], num_tokens: int) -> None:
        """The sequence starts with ``num_tokens`` tokens found, its first blocks being those of ``entries``."""
        chain.entries = entries
        chain.num_announced = len(entries)
        chain.epoch = self.epoch
        self.num_query_tokens += chain.num_tokens
        self.num_hit_tokens += num_tokens

    def end(self, chain: PrefixChain) -> None:
        """The sequence has no blocks any more. It may start again."""
        self.withdraw(chain)
        chain.entries = []
        chain.num_announced = 0
        chain.epoch = self.epoch

    def drop_all(self) -> None:
        """Nothing is cached any more; nor will what tables hold now ever be."""
        self._pool.drop_cached()
        self.epoch += 1

    def check_idle(self) -> None:
        """Raises AssertionError when blocks are announced: for when no sequence has blocks."""
        if self._announced:
            raise AssertionError(f"{len(self._announced)} blocks are announced and nobody computes them")

    def _match_tail(self, parent: Parent, wanted: bytes) -> TailMatch | None:
        found = self._index.find_tail(parent, wanted) if wanted else None
        if found is None:
            return None
        block, num_tokens = found
        return TailMatch(block, self._index.entries[block], num_tokens)

    def _num_pending_tokens(self, chain: PrefixChain, first: int) -> int:
        end = chain.num_tokens // self._block_size if self._announced else first
        index = first
        while index < end and chain.hash_at(index) in self._announced:
            index += 1
        return (index - first) * self._block_size

    def _take_announcement_back(self, block_hash: bytes) -> None:
        count = self._announced.pop(block_hash)
        if count > 1:
            self._announced[block_hash] = count - 1
