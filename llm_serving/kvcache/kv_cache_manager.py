"""From tokens to block tables: on demand, shared where a prefix is the same, or in one piece.

A block table is a plain list of block ids that its sequence owns; entry ``i`` holds the keys and values of the
positions ``i * block_size .. (i + 1) * block_size - 1`` (paged attention, Kwon et al. 2023).

A block that more than one table names is full and never written again. Where a sequence continues in the middle of
a block that is not its own, the block is copied first: ``BlockCopy`` names the blocks and keeps the source, and the
caller gives it back to ``end_copies`` when the step that copied was answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llm_serving.kvcache.block_copy import BlockCopies, BlockCopy
from llm_serving.kvcache.block_hash import BlockHash, blake2b_128
from llm_serving.kvcache.block_pool import BlockPool
from llm_serving.kvcache.contiguous_pool import ContiguousPool
from llm_serving.kvcache.host_block_pool import HostBlockPool
from llm_serving.kvcache.prefix_cache import PrefixCache, PrefixMatch, TailMatch
from llm_serving.kvcache.prefix_chain import PrefixChain
from llm_serving.kvcache.prefix_index import PrefixIndex

__all__ = ["Adoption", "BlockCopy", "KVCacheManager"]


@dataclass(frozen=True, slots=True)
class Adoption:
    """What a sequence starts with."""

    num_tokens: int
    """Its first tokens that need not be computed, once ``copies`` have run."""
    copies: list[BlockCopy]


class KVCacheManager:
    """Grows block tables from one pool and takes them back.

    ``prefix_cache`` keeps what was computed and finds it again; ``namespace`` is everything besides tokens and salt
    that it depends on (model, weights, format of the cache). ``contiguous`` gives tables in one piece, which cannot
    be shared. ``num_host_blocks`` are for swapped sequences.
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
        block_hash: BlockHash = blake2b_128,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        if prefix_cache and contiguous:
            raise ValueError("a prefix cache shares blocks between tables, contiguous tables cannot share: choose one")
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._contiguous = ContiguousPool(num_blocks) if contiguous else None
        self._host_pool = HostBlockPool(num_host_blocks)
        self._prefix_cache = PrefixCache(self._pool, block_size, namespace, block_hash) if prefix_cache else None
        self._copies = BlockCopies(self._pool)

    @property
    def num_usable_blocks(self) -> int:
        return self._pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table and no copy holds, those among them that are cached."""
        return (self._contiguous or self._pool).num_free_blocks

    @property
    def num_free_cached_blocks(self) -> int:
        return self._pool.num_free_cached_blocks

    @property
    def num_free_host_blocks(self) -> int:
        return self._host_pool.num_free_blocks

    @property
    def num_copies_under_way(self) -> int:
        """Copies begun and not ended, each of which holds its source."""
        return self._copies.num_under_way

    @property
    def prefix_query_tokens(self) -> int:
        """Tokens of sequences that started, each time they did."""
        return self._prefix_cache.num_query_tokens if self._prefix_cache is not None else 0

    @property
    def prefix_hit_tokens(self) -> int:
        """Those of them that need not be computed."""
        return self._prefix_cache.num_hit_tokens if self._prefix_cache is not None else 0

    @property
    def num_reserved_tokens(self) -> int:
        """Slots for tokens in all block tables; a block in two tables counts twice, as its tokens do."""
        if self._contiguous is not None:
            return (self._contiguous.num_usable_blocks - self._contiguous.num_free_blocks) * self.block_size
        return (self._pool.num_holds - self._copies.num_under_way) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def grow(self, block_table: list[int], num_tokens: int) -> bool:
        """Make ``block_table`` long enough for ``num_tokens`` tokens, in place. All or nothing: False when the
        free blocks do not suffice, and nothing has changed."""
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
        """Make an empty table long enough for all tokens the sequence will ever have, with consecutive blocks.
        False when no free range is long enough, and nothing has changed. Only with ``contiguous``."""
        if self._contiguous is None or block_table:
            raise AssertionError("only an empty table is reserved, and only where tables are contiguous")
        blocks = self._contiguous.allocate(self.blocks_for(num_tokens))
        if blocks is None:
            return False
        block_table += blocks
        return True

    def free(self, block_table: list[int], chain: PrefixChain | None = None) -> None:
        """Take every block of the table back; what is committed stays cached. The caller drops the list: it is left
        as it was. ``chain`` is ready for the next start."""
        (self._contiguous or self._pool).free(block_table)
        if chain is not None:
            self._prefixes.end(chain)

    def new_chain(self, token_ids: Sequence[int], salt: bytes = b"") -> PrefixChain:
        """What a sequence needs to be matched: one for each, for as long as it is served. Sequences of different
        salts share nothing."""
        return self._prefixes.new_chain(token_ids, salt)

    def match_prefix(self, chain: PrefixChain) -> PrefixMatch:
        """What is cached of the chain's tokens, but for the last one. Nothing changes, nothing is held."""
        return self._prefixes.match(chain)

    def known_prefix(self, hashes: Iterable[bytes]) -> tuple[int, int]:
        """Of the full blocks with these chained hashes: how many, from the first, are cached or being computed, and
        how many of those are held. (0, 0) without a prefix cache. A forecast for choosing between several caches:
        ``match_prefix`` has the last word."""
        return (0, 0) if self._prefix_cache is None else self._prefix_cache.known(hashes)

    def spare_blocks(self, match: PrefixMatch, num_tokens: int) -> int:
        """Free blocks that are left when a sequence of ``num_tokens`` tokens adopts a match; negative: too few."""
        blocks, _ = self._prefixes.current_part(match)
        missing = max(self.blocks_for(num_tokens) - len(blocks), 0)
        pool = self._pool
        return pool.num_free_blocks - sum(not pool.ref_count(block) for block in blocks) - missing

    def adopt(self, block_table: list[int], chain: PrefixChain, match: PrefixMatch, num_tokens: int) -> Adoption | None:
        """Start a sequence: its empty table gets the blocks of the match and new ones, to hold ``num_tokens`` tokens.

        What was evicted since the match is left out, and so is the tail where the blocks do not suffice to keep its
        source: the answer says how many tokens the sequence has. None when the free blocks do not suffice, and
        nothing has changed.

        A tail is worth its copy. Copying a token's keys and values moves some KB; computing them takes two
        operations for each weight of the model: a thousand times the time, on any device. So a prompt that is
        cached to its end, with a length that is a multiple of the block, copies its last block less one token.
        """
        if block_table:
            raise AssertionError(f"a table of {len(block_table)} blocks cannot adopt a prefix: it has begun already")
        prefixes, pool = self._prefixes, self._pool
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

    def announce(self, chain: PrefixChain, end: int) -> None:
        """A step in flight computes the chain's tokens up to ``end``: whoever needs them better waits."""
        self._prefixes.announce(chain, end)

    def commit(self, block_table: list[int], chain: PrefixChain, num_computed: int) -> None:
        """The chain's first ``num_computed`` tokens are in the table's blocks, the steps that computed them being
        answered: from now on they are found, the last block too when it is not full.

        For the answers of prefill steps and before ``free``. Not for every token of a decode: it looks at all blocks
        of the chain. A table that was not begun by ``adopt`` since the last ``drop_all`` is not committed.
        """
        self._prefixes.commit(block_table, chain, num_computed)

    def withdraw(self, chain: PrefixChain) -> None:
        """Steps that were announced failed, or will never run."""
        self._prefixes.withdraw(chain)

    def drop_all(self) -> None:
        """The device's memory is lost: nothing is cached, and what the tables of now hold is never committed. Who
        holds which block stays as it is; every table is still to be freed, every copy to be ended."""
        if self._prefix_cache is not None:
            self._prefix_cache.drop_all()

    def fork(self, block_table: list[int], num_tokens: int) -> tuple[list[int], list[BlockCopy]] | None:
        """A second table for the same first ``num_tokens`` tokens: full blocks shared, the last one, if it is not
        full, copied. None when no block is free for it. The blocks are complete: no step in flight writes them."""
        if self._contiguous is not None:
            raise AssertionError("contiguous tables share nothing: a parallel sample is a request of its own")
        num_full, rest = divmod(num_tokens, self.block_size)
        if rest and not self._pool.num_free_blocks:
            return None
        table = block_table[:num_full]
        self._pool.share(table)
        if not rest:
            return table, []
        copy = self._copies.begin(block_table[num_full])
        table.append(copy.destination)
        return table, [copy]

    def end_copies(self, copies: Iterable[BlockCopy]) -> None:
        """The step with these copies was answered, or will never run: their sources are no longer held."""
        self._copies.end(copies)

    def host_allocate(self, count: int) -> list[int] | None:
        """Blocks of the host pool. None when so many are not free, and nothing has changed."""
        return self._host_pool.allocate(count)

    def host_free(self, blocks: list[int]) -> None:
        self._host_pool.free(blocks)

    def waste(self, num_tokens: int) -> float:
        """Share of the slots in all tables that hold nothing, ``num_tokens`` being what they hold: 0 to 1."""
        reserved = self.num_reserved_tokens
        return (reserved - num_tokens) / reserved if reserved else 0.0

    @property
    def prefix_index(self) -> PrefixIndex:
        """The contents of the cached blocks."""
        return self._pool.index

    def snapshot(self, contents: list[bytes]) -> dict[str, Any]:
        """Returns the state of all pools and of the prefix cache. ``contents`` replaces the tokens of each block."""
        contiguous, prefix_cache = self._contiguous, self._prefix_cache
        return {
            "pool": self._pool.snapshot(),
            "contiguous": None if contiguous is None else contiguous.snapshot(),
            "host_pool": self._host_pool.snapshot(),
            "copies": self._copies.sources(),
            "prefix_cache": None if prefix_cache is None else prefix_cache.snapshot(contents),
        }

    def restore(self, state: dict[str, Any]) -> int:
        """Restores what ``snapshot`` returned. Returns the number of cached blocks that cannot be found any more."""
        self._pool.restore(state["pool"])
        if self._contiguous is not None:
            self._contiguous.restore(state["contiguous"])
        self._host_pool.restore(state["host_pool"])
        self._copies.restore(state["copies"])
        return 0 if self._prefix_cache is None else self._prefix_cache.restore(state["prefix_cache"])

    def restore_chain(self, state: dict[str, Any], salt: bytes) -> PrefixChain:
        """Returns the chain that ``PrefixChain.snapshot`` saved, and announces its blocks again."""
        chain = self.new_chain([], salt)
        chain.restore(state)
        self._prefixes.restore_announcements(chain)
        return chain

    def check_integrity(self, block_tables: list[list[int]], host_tables: Sequence[list[int]] = ()) -> None:
        """Raises AssertionError unless tables, copies under way and free blocks are every usable block.

        Costs in proportion to what is held.
        """
        held = [block for table in block_tables for block in table]
        held += self._copies.sources()
        (self._contiguous or self._pool).check_integrity(held)
        self._host_pool.check_integrity([block for table in host_tables for block in table])
        if self._prefix_cache is not None and not held:
            self._prefix_cache.check_idle()

    def check_cache(self) -> None:
        """Raises AssertionError unless free queues and prefix cache agree on every block. Looks at all of them."""
        self._pool.check_queues()

    @property
    def _prefixes(self) -> PrefixCache:
        if self._prefix_cache is None:
            raise AssertionError("there is no prefix cache")
        return self._prefix_cache

    def _adopt_tail(self, block_table: list[int], tail: TailMatch | None, spare: int) -> Adoption:
        """The table gets the tail's block, or a copy of it, if ``spare`` blocks allow that its source is held.

        A block that nobody holds and that holds nothing but the tail needs no copy: it goes on in its new table.
        """
        num_tokens = len(block_table) * self.block_size
        if tail is None:
            return Adoption(num_tokens, [])
        pool, is_free = self._pool, not self._pool.ref_count(tail.block)
        if is_free and pool.index.num_tokens(tail.block) == tail.num_tokens:
            pool.share([tail.block])
            block_table.append(tail.block)
            return Adoption(num_tokens + tail.num_tokens, [])
        if is_free and not spare:
            return Adoption(num_tokens, [])
        copy = self._copies.begin(tail.block)
        block_table.append(copy.destination)
        return Adoption(num_tokens + tail.num_tokens, [copy])
