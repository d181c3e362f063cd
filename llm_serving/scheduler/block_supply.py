"""How a sequence gets its blocks when it starts: on demand, on top of a cached prefix, or in one piece for its life.

Whatever the kind, blocks for the next tokens come from ``KVCacheManager.grow``, and all go back with ``release``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from llm_serving.kvcache.kv_cache_manager import KVCacheManager
from llm_serving.kvcache.prefix_cache import PrefixMatch
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.sequence import Sequence

__all__ = ["BlockSupply", "CachedPrefix", "ContiguousSupply", "PagedSupply", "PrefixSupply", "make_block_supply"]


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What a sequence that starts now finds computed."""

    num_tokens: int
    is_pending: bool
    """A block's worth more of its tokens, or all but the last, is being computed for another sequence: who waits finds
    them. Less is not worth a step: of equal prompts that end with a block, each would wait for the one before."""


_NOTHING_CACHED = CachedPrefix(0, False)


class BlockSupply(Protocol):
    """Starts sequences with blocks and takes the blocks back."""

    def look_up(self, sequence: Sequence) -> CachedPrefix:
        """What is cached of a waiting sequence's known tokens. Changes nothing."""

    def fits(self, sequence: Sequence, reserve: int) -> bool:
        """Whether it could start, and ``reserve`` blocks stay free."""

    def start(self, sequence: Sequence) -> None:
        """Give a sequence that fits its blocks. Its ``num_computed_tokens`` are then those it found."""

    def answered(self, sequence: Sequence, num_tokens: int) -> None:
        """The steps that computed the first ``num_tokens`` of its known tokens were answered."""

    def release(self, sequence: Sequence, *, computed: bool) -> None:
        """Take its blocks back, which no step in flight touches. ``computed``: all steps on them went well."""

    def lose_all(self) -> None:
        """The device's memory was lost. Blocks that are held are still to be released."""

    @property
    def version(self) -> int:
        """Goes up whenever the prefix match of a sequence can change."""


class PagedSupply:
    """Blocks for the known tokens, and one more at a time as they become more."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache

    def look_up(self, sequence: Sequence) -> CachedPrefix:
        return _NOTHING_CACHED

    def fits(self, sequence: Sequence, reserve: int) -> bool:
        kv_cache = self._kv_cache
        return kv_cache.blocks_for(sequence.request.num_tokens) + reserve <= kv_cache.num_free_blocks

    def start(self, sequence: Sequence) -> None:
        if not self._kv_cache.grow(sequence.block_table, sequence.request.num_tokens):
            raise AssertionError(f"no blocks to start {sequence.request.request_id}")

    def answered(self, sequence: Sequence, num_tokens: int) -> None:
        pass

    def release(self, sequence: Sequence, *, computed: bool) -> None:
        self._kv_cache.free(sequence.block_table)

    def lose_all(self) -> None:
        pass

    @property
    def version(self) -> int:
        return 0


class ContiguousSupply(PagedSupply):
    """One range of blocks for the prompt and the longest answer (``model_config.page_attention: false``), as servers
    had before paged attention. It is never preempted for want of blocks, and much of it is never used."""

    def fits(self, sequence: Sequence, reserve: int) -> bool:
        table: list[int] = []
        found = self._kv_cache.reserve(table, sequence.max_cached_tokens)
        self._kv_cache.free(table)
        return found

    def start(self, sequence: Sequence) -> None:
        if not self._kv_cache.reserve(sequence.block_table, sequence.max_cached_tokens):
            raise AssertionError(f"no range of blocks to start {sequence.request.request_id}")


class PrefixSupply(PagedSupply):
    """Blocks that hold the same prefix are shared, whoever computed them. A partial block is copied.

    What a prompt needs is announced when it starts and found by others once it is computed; what is generated,
    when its sequence gives its blocks back: then no step in flight is left to wait for, and a decode step costs
    nothing for it.
    """

    def __init__(self, kv_cache: KVCacheManager) -> None:
        super().__init__(kv_cache)
        self._num_changes = 0
        """Goes up whenever a match may have become another one."""

    def look_up(self, sequence: Sequence) -> CachedPrefix:
        match, size = self._match(sequence), self._kv_cache.block_size
        found_later = min(len(match.blocks) * size + match.num_pending_tokens, sequence.request.num_tokens - 1)
        gain = found_later - match.num_tokens
        return CachedPrefix(match.num_tokens, match.pending and gain >= min(size, found_later) > 0)

    def fits(self, sequence: Sequence, reserve: int) -> bool:
        return self._kv_cache.spare_blocks(self._match(sequence), sequence.request.num_tokens) >= reserve

    def start(self, sequence: Sequence) -> None:
        request, chain, match = sequence.request, sequence.prefix_chain, self._match(sequence)
        assert chain is not None, "looked up before"
        adoption = self._kv_cache.adopt(sequence.block_table, chain, match, request.num_tokens)
        if adoption is None:
            raise AssertionError(f"no blocks to start {request.request_id}")
        request.num_computed_tokens = adoption.num_tokens
        sequence.copies = adoption.copies
        self._kv_cache.announce(chain, request.num_tokens)
        self._change(sequence)

    def answered(self, sequence: Sequence, num_tokens: int) -> None:
        if sequence.prefix_chain is not None:
            self._kv_cache.commit(sequence.block_table, sequence.prefix_chain, num_tokens)
            self._num_changes += 1

    def release(self, sequence: Sequence, *, computed: bool) -> None:
        chain, request = sequence.prefix_chain, sequence.request
        if chain is not None and computed:
            chain.extend(sequence.known_tokens(chain.num_tokens, request.num_tokens))
            self.answered(sequence, min(request.num_computed_tokens, request.num_tokens))
        self._kv_cache.free(sequence.block_table, chain)
        self._change(sequence)

    def lose_all(self) -> None:
        self._kv_cache.drop_all()
        self._num_changes += 1

    @property
    def version(self) -> int:
        return self._num_changes

    def _match(self, sequence: Sequence) -> PrefixMatch:
        """The match of a waiting sequence, looked up again only where something has changed."""
        known = sequence.prefix_match
        if known is not None and known[0] == self._num_changes:
            return known[1]
        request, chain = sequence.request, sequence.prefix_chain
        if chain is None:
            chain = self._kv_cache.new_chain(sequence.known_tokens(0, request.num_tokens), request.cache_salt)
            sequence.prefix_chain = chain
        elif chain.num_tokens < request.num_tokens:
            chain.extend(sequence.known_tokens(chain.num_tokens, request.num_tokens))
        match = self._kv_cache.match_prefix(chain)
        sequence.prefix_match = (self._num_changes, match)
        return match

    def _change(self, sequence: Sequence) -> None:
        sequence.prefix_match = None
        self._num_changes += 1


def make_block_supply(limits: SchedulerLimits, kv_cache: KVCacheManager) -> BlockSupply:
    """The kind that the limits ask for."""
    if not limits.page_attention:
        return ContiguousSupply(kv_cache)
    return PrefixSupply(kv_cache) if limits.prefix_cache else PagedSupply(kv_cache)
