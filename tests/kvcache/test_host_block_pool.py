from __future__ import annotations

import pytest

from llm_serving.kvcache.host_block_pool import HostBlockPool
from llm_serving.kvcache.kv_cache_manager import KVCacheManager


def test_allocation_is_all_or_nothing_and_starts_at_block_0() -> None:
    manager = KVCacheManager(4, 4, num_host_blocks=3)
    table = manager.host_pool.allocate(2)
    assert table == [0, 1]
    assert manager.host_pool.allocate(2) is None
    assert len(manager.host_pool._free) == 1
    manager.check_integrity([], [table])
    manager.host_pool.free(table)
    assert manager.host_pool.allocate(3) == [0, 1, 2]


def test_a_host_pool_may_be_empty() -> None:
    assert HostBlockPool(0).allocate(1) is None
    assert HostBlockPool(0).allocate(0) == []
    with pytest.raises(ValueError, match="num_host_blocks is -1"):
        HostBlockPool(-1)


def test_the_integrity_check_finds_lost_and_duplicate_host_blocks() -> None:
    pool = HostBlockPool(3)
    pool.allocate(2)
    with pytest.raises(AssertionError, match="host block 2 is freed but not allocated"):
        pool.free([2])
    with pytest.raises(AssertionError, match="1 host blocks held and 1 free are not 3 in total"):
        pool.check_integrity([0])
    with pytest.raises(AssertionError, match="held twice, or held while free"):
        pool.check_integrity([0, 2])
