"""The prefix cache: finds the blocks that have the first tokens of a sequence.

A block is *announced* while a step in flight computes it, and *committed* when that step has completed. A committed
block is cached until it is evicted, even while it is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llm_serving.kvcache.block_hash import BlockHash, root_hash
from llm_serving.kvcache.block_pool import BlockPool
from llm_serving.kvcache.prefix_chain import PrefixChain
from llm_serving.kvcache.prefix_index import Parent


@dataclass(frozen=True, slots=True)
class TailMatch:
    """A cached block of which only the first ``num_tokens`` tokens match.

    A sequence must copy the block, because after these tokens it will write other tokens than the block has.
    """

    block: int
    entry: int
    """The index entry of the block at the time of the lookup."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The blocks that a lookup found for the first tokens of a sequence.

    A match does not hold its blocks, so they may be evicted before the sequence starts. ``KVCacheManager.adopt``
    therefore checks them again.
    """

    blocks: list[int]
    """The cached full blocks of the sequence, in order from its first block."""
    entries: list[int]
    """The index entry of each of ``blocks`` at the time of the lookup."""
    num_tokens: int
    """Number of tokens in ``blocks`` and ``tail``. The sequence's last token is not included: it must be computed."""
    tail: TailMatch | None
    num_pending_tokens: int
    """Number of tokens in the full blocks after ``blocks`` that steps in flight compute at present."""

    @property
    def pending(self) -> bool:
        return self.num_pending_tokens > 0

    def snapshot(self) -> list[Any]:
        """Returns the match as plain data: numbers, bytes and lists."""
        tail = None if self.tail is None else [self.tail.block, self.tail.entry, self.tail.num_tokens]
        return [self.blocks.copy(), self.entries.copy(), self.num_tokens, tail, self.num_pending_tokens]

    @classmethod
    def restored(cls, state: list[Any]) -> PrefixMatch:
        """Returns the match that ``snapshot`` saved."""
        blocks, entries, num_tokens, tail, num_pending_tokens = state
        return cls(blocks, entries, num_tokens, None if tail is None else TailMatch(*tail), num_pending_tokens)


class PrefixCache:
    """Finds blocks of ``pool`` that have the keys and values of a sequence's first tokens."""

    def __init__(self, pool: BlockPool, block_size: int, namespace: bytes, block_hash: BlockHash) -> None:
        self.epoch = 0
        """Number of calls of ``drop_all``."""
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.fresh: list[tuple[int, int]] | None = None
        """The full blocks that were committed but not yet offered to the KV tiers, as (block, index entry). None if
        there are no KV tiers."""
        self._pool = pool
        self._index = pool.index
        self._block_size = block_size
        self._namespace = namespace
        self._block_hash = block_hash
        self._announced: dict[bytes, int] = {}
        """Number of chains that announce each block, by the hash of the block."""

    def new_chain(self, token_ids: Sequence[int], salt: bytes = b"") -> PrefixChain:
        """Returns a new chain of block hashes for the tokens of a sequence.

        Chains with different salts share no blocks.
        """
        root = root_hash(self._namespace, salt, self._block_hash)
        chain = PrefixChain(token_ids, self._block_size, salt=salt, root=root, block_hash=self._block_hash)
        chain.epoch = self.epoch
        return chain

    def match(self, chain: PrefixChain) -> PrefixMatch:
        """Returns the cached blocks for the first tokens of a sequence.

        The last token is never included, because it must be computed. Does not change or hold any block.
        """
        size, usable = self._block_size, chain.num_tokens - 1
        self._refresh(chain)
        self._find_further(chain, usable // size)
        num_full = min(len(chain.blocks), usable // size)
        blocks, entries = chain.blocks[:num_full], chain.entries[:num_full]
        start = num_full * size
        tail = self._match_tail(entries[-1] if entries else chain.salt, chain.tokens(start, min(start + size, usable)))
        num_tokens = start + (tail.num_tokens if tail is not None else 0)
        return PrefixMatch(blocks, entries, num_tokens, tail, self._num_pending_tokens(chain, len(chain.blocks)))

    def known(self, hashes: Iterable[bytes]) -> tuple[int, int]:
        """Returns (known, held) for the block hashes of a prompt. Known is the number of its first blocks that are
        cached or announced. Held is the number of known blocks that are in use.

        An announced block counts as in use. Tokens are not compared, because equal hashes suffice for the router's
        forecast.
        """
        num_known = num_held = 0
        for block_hash in hashes:
            block = self._index.block_of(block_hash)
            if block is None and block_hash not in self._announced:
                break
            num_known += 1
            num_held += block is None or self._pool.ref_count(block) > 0
        return num_known, num_held

    def announce(self, chain: PrefixChain, end: int) -> None:
        """Announces all full blocks among the first ``end`` tokens of the chain, because a step in flight computes
        them.

        Other sequences with the same prefix can wait for announced blocks.
        """
        if chain.announce_begin == chain.announce_end:
            chain.announce_begin = chain.announce_end = len(chain.blocks)
        for index in range(chain.announce_end, end // self._block_size):
            block_hash = chain.hash_at(index)
            self._announced[block_hash] = self._announced.get(block_hash, 0) + 1
            chain.announce_end = index + 1

    def withdraw(self, chain: PrefixChain) -> None:
        """Withdraws the announcements of the chain's blocks that are not committed, because no step will compute these
        blocks.
        """
        self._take_announcements_back(chain, chain.announce_end)

    def commit(self, block_table: list[int], chain: PrefixChain, num_computed: int) -> None:
        """Adds the blocks with the first ``num_computed`` tokens of the chain to the cache. A last block that is not
        full is added, too.

        The steps that computed these tokens must have completed. Call this method after prefill steps and before the
        blocks are freed. Do not call it for each decoded token, because its cost is proportional to the number of
        blocks. Blocks of a sequence that started before the last ``drop_all`` are not added.
        """
        num_full = num_computed // self._block_size
        self._take_announcements_back(chain, num_full)
        if chain.epoch != self.epoch:
            return
        self._refresh(chain)
        pool, blocks, entries = self._pool, chain.blocks, chain.entries
        parent: Parent = entries[-1] if entries else chain.salt
        for index in range(len(blocks), num_full):
            block = pool.register(block_table[index], chain.hash_at(index), chain.content(index), parent)
            parent = self._index.entries[block]
            blocks.append(block)
            entries.append(parent)
            if self.fresh is not None and block == block_table[index]:
                self.fresh.append((block, parent))
        rest = chain.tokens(num_full * self._block_size, num_computed)
        if rest and len(blocks) == num_full:
            pool.register_tail(block_table[num_full], rest, parent)

    def insert(self, chain: PrefixChain, first: int, blocks: list[int]) -> None:
        """Adds held full blocks, whose content was loaded from a KV tier, to the cache.

        ``blocks`` are the blocks of the chain from index ``first`` on. If a block before them is no longer cached, adds
        none. If another cached block has the same content as one of ``blocks``, does not add this block.
        """
        self._refresh(chain)
        self._find_further(chain, first)
        if len(chain.blocks) < first:
            return
        parent: Parent = chain.entries[first - 1] if first else chain.salt
        for index, block in enumerate(blocks, first):
            found = self._pool.register(block, chain.hash_at(index), chain.content(index), parent)
            parent = self._index.entries[found]

    def current_part(self, match: PrefixMatch) -> tuple[list[int], TailMatch | None]:
        """Returns the blocks of a match before the first block whose content has changed, and the tail or None.

        The tail is None if the match has no tail, or if the content of any block has changed.
        """
        num_current, tail = self._num_current(match.blocks, match.entries), match.tail
        if num_current < len(match.blocks) or (tail and self._index.entries[tail.block] != tail.entry):
            tail = None
        return match.blocks[:num_current], tail

    def begin(self, chain: PrefixChain, num_tokens: int) -> None:
        """Records that a sequence starts with ``num_tokens`` cached tokens. From now on, blocks of its chain can be
        committed, until the next ``drop_all``.

        Also counts all tokens of the chain in ``num_query_tokens``, and the cached ones in ``num_hit_tokens``.
        """
        chain.epoch, chain.num_adopted = self.epoch, num_tokens
        self.num_query_tokens += chain.num_tokens
        self.num_hit_tokens += num_tokens

    def snapshot(self, contents: list[bytes]) -> dict[str, Any]:
        """Returns the counters and the index as plain data.

        ``contents[block]`` replaces the tokens of a block. For example, a flight recording has pseudonyms there.
        """
        counters = [self.epoch, self.num_query_tokens, self.num_hit_tokens]
        fresh = None if self.fresh is None else [list(pair) for pair in self.fresh]
        return {"counters": counters, "index": self._index.snapshot(contents), "fresh": fresh}

    def restore(self, state: dict[str, Any]) -> int:
        """Restores the state that ``snapshot`` returned. The caller must then restore chains with ``restore_chain``.

        Returns the number of blocks that lookups can no longer find, because their parents are not cached.
        """
        self.epoch, self.num_query_tokens, self.num_hit_tokens = state["counters"]
        self._announced = {}
        if self.fresh is not None:
            self.fresh = [(block, entry) for block, entry in state["fresh"] or ()]
        return self._index.restore(
            state["index"], self._block_hash, lambda salt: root_hash(self._namespace, salt, self._block_hash)
        )

    def restore_chain(self, state: dict[str, Any], salt: bytes) -> PrefixChain:
        """Restores the prefix chain that ``PrefixChain.snapshot`` saved, and announces its blocks again."""
        chain = self.new_chain([], salt)
        chain.restore(state)
        for index in range(chain.announce_begin, chain.announce_end):
            block_hash = chain.hash_at(index)
            self._announced[block_hash] = self._announced.get(block_hash, 0) + 1
        return chain

    def drop_all(self) -> None:
        """Empties the cache, because the device's memory was lost. Blocks that are in block tables now will never be
        committed.

        Reference counts do not change: the caller must still free each block table and end each copy.
        """
        self._pool.drop_cached()
        self.epoch += 1
        if self.fresh is not None:
            self.fresh = []

    def check_idle(self) -> None:
        """Raises AssertionError if a block is announced. The caller calls this method when no sequence has blocks."""
        if self._announced:
            raise AssertionError(f"{len(self._announced)} blocks are announced but no sequence computes them")

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

    def _refresh(self, chain: PrefixChain) -> None:
        """Shortens the chain: removes the first block whose content has changed, and all blocks after it."""
        num_current = self._num_current(chain.blocks, chain.entries)
        del chain.blocks[num_current:], chain.entries[num_current:]

    def _num_current(self, blocks: list[int], entries: list[int]) -> int:
        """Returns the number of blocks before the first one whose content has changed.

        ``entries[i]`` is the earlier index entry of ``blocks[i]``. The content of a block is unchanged while it has
        this entry.
        """
        entries_now = self._index.entries
        if [entries_now[block] for block in blocks] == entries:
            return len(blocks)
        pairs = enumerate(zip(blocks, entries, strict=True))
        return next(index for index, (block, entry) in pairs if entries_now[block] != entry)

    def _find_further(self, chain: PrefixChain, end: int) -> None:
        """Looks up the blocks of the chain that come after ``chain.blocks``, up to block ``end - 1``. Appends those
        that are cached to ``chain.blocks``, up to the first that is not.
        """
        parent: Parent = chain.entries[-1] if chain.entries else chain.salt
        for index in range(len(chain.blocks), end):
            block = self._index.find(chain.hash_at(index), chain.content(index), parent)
            if block is None:
                return
            parent = self._index.entries[block]
            chain.blocks.append(block)
            chain.entries.append(parent)

    def _take_announcements_back(self, chain: PrefixChain, end: int) -> None:
        for index in range(chain.announce_begin, min(end, chain.announce_end)):
            block_hash = chain.hash_at(index)
            count = self._announced.pop(block_hash)
            if count > 1:
                self._announced[block_hash] = count - 1
            chain.announce_begin = index + 1
