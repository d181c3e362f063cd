from __future__ import annotations

import pytest

from llm_serving.kvcache.contiguous_pool import ContiguousPool
from llm_serving.kvcache.kv_cache_manager import KVCacheManager


def test_the_first_range_that_fits_is_allocated() -> None:
    pool = ContiguousPool(10)
    first, second, third = pool.allocate(3), pool.allocate(2), pool.allocate(3)
    assert (first, second, third) == ([1, 2, 3], [4, 5], [6, 7, 8])
    assert first is not None
    assert third is not None
    pool.free(first)
    pool.free(third)
    assert pool.allocate(4) == [6, 7, 8, 9]
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(2) is None
    assert pool.num_free_blocks == 1


def test_scattered_blocks_are_no_range() -> None:
    pool = ContiguousPool(5)
    pieces = [pool.allocate(1) for _ in range(4)]
    pool.free([1, 3])
    assert pieces == [[1], [2], [3], [4]]
    assert pool.num_free_blocks == 2
    assert pool.allocate(2) is None
    pool.check_integrity([2, 4])


@pytest.mark.parametrize("wrong", [[1, 1], [2], [0]])
def test_freeing_a_block_twice_is_an_error(wrong: list[int]) -> None:
    pool = ContiguousPool(4)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="is freed but not allocated"):
        pool.free(wrong)


def test_the_integrity_check_finds_lost_and_duplicate_blocks() -> None:
    pool = ContiguousPool(5)
    pool.allocate(2)
    with pytest.raises(AssertionError, match="1 blocks held and 2 free are not 4 in total"):
        pool.check_integrity([1])
    with pytest.raises(AssertionError, match="held twice, or held while free"):
        pool.check_integrity([1, 3])
    with pytest.raises(ValueError, match="num_blocks is 1; it must be at least 2"):
        ContiguousPool(1)


def test_a_contiguous_table_is_reserved_once_for_all_its_tokens() -> None:
    manager = KVCacheManager(8, 4, contiguous=True)
    table: list[int] = []
    other: list[int] = []
    assert manager.reserve(table, 18)
    assert table == [1, 2, 3, 4, 5]
    assert not manager.reserve(other, 12)
    assert other == []
    assert manager.grow(table, 20)
    with pytest.raises(AssertionError, match="5 blocks are reserved, 21 tokens need 1 more"):
        manager.grow(table, 21)
    assert (manager.num_free_blocks, manager.num_reserved_tokens) == (2, 20)
    manager.check_integrity([table])
    manager.free(table)
    assert manager.num_free_blocks == 7
    manager.check_integrity([])


def test_only_empty_contiguous_tables_are_reserved() -> None:
    with pytest.raises(AssertionError, match="only an empty table is reserved"):
        KVCacheManager(8, 4).reserve([], 4)
    with pytest.raises(AssertionError, match="only an empty table is reserved"):
        KVCacheManager(8, 4, contiguous=True).reserve([1], 4)
