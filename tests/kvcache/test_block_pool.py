from __future__ import annotations

import pytest

from llm_serving.kvcache.block_pool import NULL_BLOCK, BlockPool


def test_the_null_block_is_never_allocated() -> None:
    pool = BlockPool(4)
    assert pool.num_usable_blocks == 3
    assert pool.allocate(3) == [1, 2, 3]
    assert NULL_BLOCK not in [1, 2, 3]
    assert pool.num_free_blocks == 0


def test_freed_blocks_are_allocated_last_in_first_out() -> None:
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.free(second)
    pool.free(first)
    assert pool.allocate(5) == [1, 2, 3, 4, 5]


def test_allocating_too_many_blocks_is_an_error() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="3 blocks are requested, 2 are free"):
        pool.allocate(3)
    assert pool.num_free_blocks == 2


@pytest.mark.parametrize("wrong", [[1, 1], [2], [0]])
def test_freeing_a_block_twice_is_an_error(wrong: list[int]) -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="is freed but not allocated"):
        pool.free(wrong)


def test_a_pool_has_at_least_one_usable_block() -> None:
    with pytest.raises(ValueError, match="num_blocks is 1; it must be at least 2"):
        BlockPool(1)


def test_the_integrity_check_finds_lost_and_duplicate_blocks() -> None:
    pool = BlockPool(5)
    held = pool.allocate(2)
    pool.check_integrity(held)
    with pytest.raises(AssertionError, match="1 blocks held and 2 free are not 4 in total"):
        pool.check_integrity(held[:1])
    with pytest.raises(AssertionError, match="1 blocks held and 2 free are not 4 in total"):
        pool.check_integrity([held[0], held[0]])
    with pytest.raises(AssertionError, match=r"2 holds are counted, but there are 2; counts differ for \[4\]"):
        pool.check_integrity([held[0], 4])
    with pytest.raises(AssertionError, match=r"2 holds are counted, but there are 3; counts differ for \[1\]"):
        pool.check_integrity([held[0], held[0], held[1]])
