from __future__ import annotations

import pytest

from llm_serving.kvcache.kv_cache_manager import KVCacheManager


@pytest.mark.parametrize(
    ("block_size", "num_tokens", "blocks"),
    [(1, 0, 0), (1, 7, 7), (16, 1, 1), (16, 16, 1), (16, 17, 2), (128, 128, 1), (128, 129, 2)],
)
def test_the_number_of_blocks_for_a_number_of_tokens(block_size: int, num_tokens: int, blocks: int) -> None:
    assert KVCacheManager(8, block_size).blocks_for(num_tokens) == blocks


def test_a_table_grows_only_at_block_borders() -> None:
    manager, table = KVCacheManager(8, 4), []
    assert manager.grow(table, 4)
    assert table == [1]
    assert manager.grow(table, 4)
    assert table == [1]
    assert manager.grow(table, 5)
    assert table == [1, 2]
    assert manager.grow(table, 3)
    assert table == [1, 2]
    assert manager.num_free_blocks == 5


def test_growing_is_all_or_nothing() -> None:
    manager, table = KVCacheManager(4, 2), []
    assert manager.grow(table, 2)
    assert not manager.grow(table, 7)
    assert table == [1]
    assert manager.num_free_blocks == 2
    assert manager.grow(table, 6)
    assert table == [1, 2, 3]


def test_free_takes_every_block_back_and_keeps_the_list() -> None:
    manager, table = KVCacheManager(4, 2), []
    manager.grow(table, 5)
    manager.check_integrity([table])
    manager.free(table)
    assert table == [1, 2, 3]
    assert manager.num_free_blocks == manager.num_usable_blocks == 3
    manager.check_integrity([])


def test_a_block_size_of_0_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        KVCacheManager(4, 0)
