"""The base class of block supplies, which give KV cache blocks to sequences. It gives blocks on demand, and has no
prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.kvcache.kv_cache_manager import KVCacheManager
from llm_serving.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The result of a lookup for a sequence that is about to start: which of its tokens are cached."""

    num_tokens: int
    is_pending: bool
    """True if the sequence should wait, because steps in flight for other sequences compute more of its tokens.

    A sequence waits only if this gains at least one full block, or all known tokens except the last. Otherwise, equal
    prompts that end at the end of a block would start one after the other, each to gain a single token.
    """


_NOTHING_CACHED = CachedPrefix(0, False)


class BlockSupply:
    """Gives a starting sequence empty blocks for its known tokens (paged attention)."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache

    @property
    def version(self) -> int:
        """A number that increases whenever a lookup in the prefix cache may find something else than before."""
        return 0

    def look_up(self, sequence: Sequence) -> CachedPrefix:
        """Looks up which known tokens of a waiting sequence are cached. Does not change blocks."""
        return _NOTHING_CACHED

    def fits(self, sequence: Sequence, reserve: int) -> bool:
        """Returns True if enough blocks are free to start the sequence and leave ``reserve`` blocks free."""
        kv_cache = self._kv_cache
        return kv_cache.blocks_for(sequence.request.num_tokens) + reserve <= kv_cache.num_free_blocks

    def start(self, sequence: Sequence) -> None:
        """Gives blocks to a sequence for which ``fits`` is True, and counts its cached tokens as computed."""
        if not self._kv_cache.grow(sequence.block_table, sequence.request.num_tokens):
            raise AssertionError(f"no blocks to start {sequence.request.request_id}")

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Records that completed steps have computed the first ``num_tokens`` known tokens of a sequence."""

    def release(self, sequence: Sequence, *, computed: bool) -> None:
        """Takes the blocks of a sequence back. No step in flight may use them.

        ``computed``: True if all steps of the sequence ran without errors, so that its blocks can be cached.
        """
        self._kv_cache.free(sequence.block_table)

    def lose_all(self) -> None:
        """Forgets all cached tokens, because the device's memory was lost. The caller must still release each sequence.
        """
