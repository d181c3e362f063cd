"""Checks that the prefix cache agrees with the pool of blocks. The check looks at every block."""

from __future__ import annotations

from llm_serving.kvcache.kv_cache_manager import KVCacheManager
from llm_serving.kvcache.prefix_index import PrefixIndex


def check_cache(manager: KVCacheManager) -> None:
    """Checks that free blocks with cached content and free blocks without content are in separate queues.

    Also checks that the index of cached blocks is consistent: hashes, entries, and the children of each entry.
    """
    pool = manager._pool
    entries = pool.index.entries
    free = sorted([*pool._free, *pool._free_cached])
    assert free == [block for block in range(1, pool.num_blocks) if not pool.ref_count(block)]
    assert not [block for block in pool._free if entries[block]], "a cached block is in the queue of other blocks"
    assert all(entries[block] for block in pool._free_cached), "a block without content is in the cached queue"
    _check_index(pool.index)


def _check_index(index: PrefixIndex) -> None:
    for block_hash, block in index._blocks.items():
        assert index.entries[block]
        assert index._hashes[block] == block_hash
    assert sum(map(bool, index._hashes)) == len(index._blocks), "a block has a hash that does not lead to it"
    for parent, blocks in index._children.items():
        assert all(index.entries[block] and index._parents[block] == parent for block in blocks)
