"""The KV cache manager: gives blocks to sequences on demand, with shared prefixes, or as ranges of consecutive blocks.

A block table is a plain list of block ids that its sequence owns. Entry ``i`` is the block with the keys and values of
the positions ``i * block_size .. (i + 1) * block_size - 1`` (paged attention, Kwon et al. 2023).

A block that is in several block tables is full, so no step writes to it. If a sequence continues in the middle of a
cached block, it first copies the block (copy-on-write). ``BlockCopy`` has the ids of the source block, which is held,
and of the new block. When the step that copies has completed, the caller passes the ``BlockCopy`` to ``end_copies``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llm_serving.kvcache.block_hash import BlockHash, blake2b_128
from llm_serving.kvcache.block_pool import BlockCopies, BlockCopy, BlockPool
from llm_serving.kvcache.contiguous_pool import ContiguousPool
from llm_serving.kvcache.host_block_pool import HostBlockPool
from llm_serving.kvcache.prefix_cache import PrefixCache, PrefixMatch, TailMatch
from llm_serving.kvcache.prefix_chain import PrefixChain
from llm_serving.kvcache.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class Adoption:
    """The tokens and copies that a starting sequence gets from the prefix cache."""

    num_tokens: int
    """Number of the sequence's first tokens whose keys and values are present once ``copies`` have run."""
    copies: list[BlockCopy]


class KVCacheManager:
    """Gives blocks to sequences and takes them back.

    ``prefix_cache``: keep computed blocks for other sequences. ``namespace`` identifies the model, the weights and the
    cache format. The content of a block depends only on these, the tokens and the salt. ``contiguous``: each block
    table is a range of consecutive blocks, which cannot be shared. ``num_host_blocks``: size of the host pool for
    swapped sequences. ``copies_tails``: whether a sequence may copy a cached block of which only the first tokens
    match.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = False,
        contiguous: bool = False,
        namespace: bytes = b"",
        num_host_blocks: int = 0,
        copies_tails: bool = True,
        block_hash: BlockHash = blake2b_128,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        if prefix_cache and contiguous:
            raise ValueError("prefix_cache and contiguous exclude each other: contiguous tables cannot share blocks")
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._contiguous = ContiguousPool(num_blocks) if contiguous else None
        self.host_pool = HostBlockPool(num_host_blocks)
        self._prefix_cache = PrefixCache(self._pool, block_size, namespace, block_hash) if prefix_cache else None
        self._copies = BlockCopies(self._pool)
        self._copies_tails = copies_tails
        self._lent: Counter[int] = Counter()

    @property
    def num_usable_blocks(self) -> int:
        return self._pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that no block table and no copy holds. Free blocks that are still cached count, too."""
        return (self._contiguous or self._pool).num_free_blocks

    @property
    def num_copies_under_way(self) -> int:
        """Number of copies that have begun and not ended. Each copy holds its source block."""
        return self._copies.num_under_way

    @property
    def num_lent(self) -> int:
        """Number of holds on blocks that steps copy to or from a KV tier.

        ``lend`` and ``take`` add these holds, and ``give_back`` removes them. A block with a hold is not evicted.
        """
        return self._lent.total()

    @property
    def prefix_query_tokens(self) -> int:
        """Number of tokens that were looked up in the prefix cache.

        Each start of a sequence adds all its known tokens.
        """
        return self._prefix_cache.num_query_tokens if self._prefix_cache is not None else 0

    @property
    def prefix_hit_tokens(self) -> int:
        """Number of tokens that were looked up and found in the prefix cache."""
        return self._prefix_cache.num_hit_tokens if self._prefix_cache is not None else 0

    @property
    def num_reserved_tokens(self) -> int:
        """Number of KV positions in all block tables. If a block is in two tables, its positions count twice."""
        if self._contiguous is not None:
            return (self._contiguous.num_usable_blocks - self._contiguous.num_free_blocks) * self.block_size
        return (self._pool.num_holds - self._copies.num_under_way - self.num_lent) * self.block_size

    @property
    def prefixes(self) -> PrefixCache:
        """The prefix cache. Raises AssertionError if there is none."""
        if self._prefix_cache is None:
            raise AssertionError("there is no prefix cache")
        return self._prefix_cache

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that one sequence needs for ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def grow(self, block_table: list[int], num_tokens: int) -> bool:
        """Appends blocks to ``block_table`` until it has capacity for ``num_tokens`` tokens.

        If too few blocks are free, returns False and changes nothing.
        """
        missing = -(-num_tokens // self.block_size) - len(block_table)
        if missing <= 0:
            return True
        if self._contiguous is not None:
            raise AssertionError(f"{len(block_table)} blocks are reserved, {num_tokens} tokens need {missing} more")
        if missing > self._pool.num_free_blocks:
            return False
        block_table += self._pool.allocate(missing)
        return True

    def reserve(self, block_table: list[int], num_tokens: int) -> bool:
        """Fills an empty block table with consecutive blocks for ``num_tokens``, the maximum length of the sequence.

        If no free range is long enough, returns False and changes nothing. Used only with ``contiguous``.
        """
        if self._contiguous is None or block_table:
            raise AssertionError("only an empty table is reserved, and only if tables are contiguous")
        blocks = self._contiguous.allocate(self.blocks_for(num_tokens))
        if blocks is None:
            return False
        block_table += blocks
        return True

    def free(self, block_table: list[int], chain: PrefixChain | None = None) -> None:
        """Removes one hold from each block of a block table.

        Blocks that are committed to the prefix cache stay cached. Blocks of ``chain`` that no step has computed yet are
        withdrawn, so that no other sequence waits for them. The chain stays valid for the sequence's next start. The
        list ``block_table`` is not changed, but the caller must not use it again.
        """
        (self._contiguous or self._pool).free(block_table)
        if chain is not None:
            self.prefixes.withdraw(chain)

    def spare_blocks(self, match: PrefixMatch, num_tokens: int) -> int:
        """Returns how many blocks would stay free if a sequence with ``num_tokens`` tokens started on the blocks of
        ``match``.

        The result is negative if too few blocks are free.
        """
        blocks, _ = self.prefixes.current_part(match)
        missing = max(self.blocks_for(num_tokens) - len(blocks), 0)
        pool = self._pool
        return pool.num_free_blocks - sum(not pool.ref_count(block) for block in blocks) - missing

    def adopt(self, block_table: list[int], chain: PrefixChain, match: PrefixMatch, num_tokens: int) -> Adoption | None:
        """Starts a sequence. Fills its empty block table with the blocks of ``match`` and with new blocks, for
        ``num_tokens`` tokens in all.

        If a block of ``match`` was evicted since the lookup, uses only the blocks before it. A match may end with a
        tail, a block of which only the first tokens match. The tail is copied, and its source block is held during the
        copy. If too few blocks are free for the copy, the tail is not used. If too few blocks are free for the
        sequence, returns None and changes nothing.

        On a CPU, copying a tail takes about a thousandth of the time of computing its tokens. A copy moves some KB per
        token, and the computation takes two operations per token for each weight of the model. So even if a prompt is
        completely cached, its last block is copied, and only its last token is computed. With ``copies_tails=False``,
        the tail is computed instead. This is for devices whose copies stop all streams.
        """
        if block_table:
            raise AssertionError(f"a table of {len(block_table)} blocks cannot adopt a prefix: it must be empty")
        prefixes, pool = self.prefixes, self._pool
        blocks, tail = prefixes.current_part(match)
        missing = max(self.blocks_for(num_tokens) - len(blocks), 0)
        spare = pool.num_free_blocks - sum(not pool.ref_count(block) for block in blocks) - missing
        if spare < 0:
            return None
        pool.share(blocks)
        block_table += blocks
        adoption = self._adopt_tail(block_table, tail if missing else None, spare)
        block_table += pool.allocate(len(blocks) + missing - len(block_table))
        prefixes.begin(chain, adoption.num_tokens)
        return adoption

    def end_copies(self, copies: Iterable[BlockCopy]) -> None:
        """Ends the copies of a step that has completed or will never run. Removes the holds on their source blocks."""
        self._copies.end(copies)

    def lend(self, blocks: list[int]) -> None:
        """Adds a hold to cached blocks that a step will read, or that must not be evicted before a load ends."""
        self._pool.share(blocks)
        self._lent.update(blocks)

    def take(self, count: int) -> list[int]:
        """Returns new blocks, which a step will fill from a KV tier. The caller must have checked that they are free.
        """
        blocks = self._pool.allocate(count)
        self._lent.update(blocks)
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        """Removes the holds of ``lend`` or ``take``. A block that was cached in the meantime stays cached."""
        self._lent -= Counter(blocks)
        self._pool.free(blocks)

    def give_all_back(self) -> None:
        """Removes all holds of ``lend`` and ``take``, because the steps that need them will never complete."""
        self.give_back(list(self._lent.elements()))

    @property
    def prefix_index(self) -> PrefixIndex:
        """The index of cached blocks. It knows the tokens of each block."""
        return self._pool.index

    def snapshot(self, contents: list[bytes]) -> dict[str, Any]:
        """Returns the state of the pools and of the prefix cache as plain data.

        ``contents[block]`` replaces the tokens of a block. For example, a flight recording has pseudonyms there.
        """
        contiguous, prefix_cache = self._contiguous, self._prefix_cache
        return {
            "pool": self._pool.snapshot(),
            "contiguous": None if contiguous is None else contiguous.snapshot(),
            "host_pool": self.host_pool.snapshot(),
            "copies": self._copies.sources(),
            "lent": list(self._lent.elements()),
            "prefix_cache": None if prefix_cache is None else prefix_cache.snapshot(contents),
        }

    def restore(self, state: dict[str, Any]) -> int:
        """Restores the state that ``snapshot`` returned.

        Returns the number of cached blocks that lookups can no longer find, because their parents are not cached.
        """
        self._pool.restore(state["pool"])
        if self._contiguous is not None:
            self._contiguous.restore(state["contiguous"])
        self.host_pool.restore(state["host_pool"])
        self._copies.restore(state["copies"])
        self._lent = Counter(state["lent"])
        return 0 if self._prefix_cache is None else self._prefix_cache.restore(state["prefix_cache"])

    def check_integrity(self, block_tables: list[list[int]], host_tables: Sequence[list[int]] = ()) -> None:
        """Raises AssertionError unless each usable block is either free or held, and each host block is either free or
        in one of ``host_tables``.

        Block tables, copies under way, and moves to and from KV tiers hold blocks. The cost is proportional to the
        number of held blocks.
        """
        held = [block for table in block_tables for block in table]
        held += self._copies.sources()
        held += self._lent.elements()
        (self._contiguous or self._pool).check_integrity(held)
        self.host_pool.check_integrity([block for table in host_tables for block in table])
        if self._prefix_cache is not None and not held:
            self._prefix_cache.check_idle()

    def _adopt_tail(self, block_table: list[int], tail: TailMatch | None, spare: int) -> Adoption:
        """Appends a block with the tokens of the tail to a block table, if possible. The tail is a cached block of
        which only the first tokens match.

        If the tail's block is free and has only the matching tokens, the sequence continues in this block. Otherwise
        the block is copied. ``spare`` is the number of free blocks that the sequence does not need. The copy of a free
        block takes one of them, because the source is held during the copy. If the block cannot be copied, the sequence
        computes its tokens again.
        """
        num_tokens = len(block_table) * self.block_size
        if tail is None:
            return Adoption(num_tokens, [])
        pool, is_free = self._pool, not self._pool.ref_count(tail.block)
        if is_free and pool.index.num_tokens(tail.block) == tail.num_tokens:
            pool.share([tail.block])
            block_table.append(tail.block)
            return Adoption(num_tokens + tail.num_tokens, [])
        if not self._copies_tails or (is_free and not spare):
            return Adoption(num_tokens, [])
        copy = self._copies.begin(tail.block)
        block_table.append(copy.destination)
        return Adoption(num_tokens + tail.num_tokens, [copy])
