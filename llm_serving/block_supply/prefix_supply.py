"""Shares the blocks of a cached prefix with a sequence that starts, and gives it more blocks when it needs them."""

from __future__ import annotations

from llm_serving.block_supply.base import BlockSupply, CachedPrefix
from llm_serving.kvcache.kv_cache_manager import KVCacheManager
from llm_serving.kvcache.prefix_cache import PrefixMatch
from llm_serving.scheduler.sequence import Sequence


class PrefixSupply(BlockSupply):
    """Lets sequences share the blocks of a cached prefix (``model_config.prefix_cache``), and gives them further blocks
    when they need them.

    If only the first tokens of a cached block match, the sequence gets a copy of the block. When a sequence starts, its
    prompt is announced to the prefix cache. A sequence with an equal prompt can then wait until the prompt is computed,
    and share its blocks. The output of a sequence enters the prefix cache only when the sequence gives its blocks back.
    So decode steps do not update the prefix cache.
    """

    def __init__(self, kv_cache: KVCacheManager) -> None:
        super().__init__(kv_cache)
        self._prefixes = kv_cache.prefixes
        self._num_changes = 0

    @property
    def version(self) -> int:
        return self._num_changes

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
        self._prefixes.announce(chain, request.num_tokens)
        self._change(sequence)

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        chain = sequence.prefix_chain
        if chain is None:
            # The sequence did not start in this scheduler. Its blocks came from another replica.
            chain = self._prefixes.new_chain(sequence.known_tokens(0, num_tokens), sequence.request.cache_salt)
            sequence.prefix_chain = chain
        self._prefixes.commit(sequence.block_table, chain, num_tokens)
        self._num_changes += 1

    def release(self, sequence: Sequence, *, computed: bool) -> None:
        chain, request = sequence.prefix_chain, sequence.request
        if chain is not None and computed:
            chain.extend(sequence.known_tokens(chain.num_tokens, request.num_tokens))
            self.computed(sequence, min(request.num_computed_tokens, request.num_tokens))
        self._kv_cache.free(sequence.block_table, chain)
        self._change(sequence)

    def lose_all(self) -> None:
        self._prefixes.drop_all()
        self._num_changes += 1

    def _match(self, sequence: Sequence) -> PrefixMatch:
        """Returns the cached prefix of a waiting sequence.

        Reuses the result of the previous lookup if blocks have not changed since.
        """
        known = sequence.prefix_match
        if known is not None and known[0] == self._num_changes:
            return known[1]
        request, chain = sequence.request, sequence.prefix_chain
        if chain is None:
            chain = self._prefixes.new_chain(sequence.known_tokens(0, request.num_tokens), request.cache_salt)
            sequence.prefix_chain = chain
        elif chain.num_tokens < request.num_tokens:
            chain.extend(sequence.known_tokens(chain.num_tokens, request.num_tokens))
        match = self._prefixes.match(chain)
        sequence.prefix_match = (self._num_changes, match)
        return match

    def _change(self, sequence: Sequence) -> None:
        sequence.prefix_match = None
        self._num_changes += 1
