"""Tests prefix hits, combined with eviction, copies, equal blocks, preemption, hash collisions and lost agents."""

from __future__ import annotations

import pytest

from llm_serving.kvcache.block_hash import BlockHash, blake2b_128
from llm_serving.kvcache.kv_cache_manager import Adoption, BlockCopy, KVCacheManager
from llm_serving.kvcache.prefix_chain import PrefixChain
from support.cache_check import check_cache
from support.recorded import RecordProperty

PROMPT = list(range(100, 110))


def cached_manager(num_blocks: int = 16, block_size: int = 4, block_hash: BlockHash = blake2b_128) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, prefix_cache=True, block_hash=block_hash)


def start(manager: KVCacheManager, tokens: list[int], salt: bytes = b"") -> tuple[list[int], PrefixChain, Adoption]:
    table: list[int] = []
    chain = manager.prefixes.new_chain(tokens, salt)
    adoption = manager.adopt(table, chain, manager.prefixes.match(chain), len(tokens))
    assert adoption is not None
    return table, chain, adoption


def serve(manager: KVCacheManager, tokens: list[int], salt: bytes = b"") -> list[int]:
    """Computes all tokens of a sequence, then frees its blocks, which stay cached. Returns its block table."""
    table, chain, adoption = start(manager, tokens, salt)
    manager.end_copies(adoption.copies)
    manager.prefixes.commit(table, chain, len(tokens))
    manager.free(table, chain)
    return table


def hit_tokens(manager: KVCacheManager, tokens: list[int], salt: bytes = b"") -> int:
    return manager.prefixes.match(manager.prefixes.new_chain(tokens, salt)).num_tokens


def test_a_finished_sequence_is_found_and_its_last_block_needs_no_copy() -> None:
    manager = cached_manager()
    assert serve(manager, PROMPT) == [1, 2, 3]
    table, chain = [], manager.prefixes.new_chain([*PROMPT, 1, 2, 3])
    match = manager.prefixes.match(chain)
    assert (match.blocks, match.num_tokens, match.pending) == ([1, 2], 10, False)
    adoption = manager.adopt(table, chain, match, 13)
    assert adoption == Adoption(10, [])
    assert table == [1, 2, 3, 4]
    assert (manager.prefix_query_tokens, manager.prefix_hit_tokens) == (23, 10)
    manager.check_integrity([table])
    check_cache(manager)


def test_a_held_last_block_is_copied() -> None:
    manager = cached_manager()
    first, chain, _ = start(manager, PROMPT)
    manager.prefixes.commit(first, chain, 10)
    second, _, adoption = start(manager, [*PROMPT, 1])
    assert (second, adoption) == ([1, 2, 4], Adoption(10, [BlockCopy(3, 4)]))
    manager.check_integrity([first, second])


def test_a_prompt_cached_to_its_end_copies_the_last_block_less_one_token() -> None:
    manager = cached_manager()
    serve(manager, PROMPT[:8])
    table, _, adoption = start(manager, PROMPT[:8])
    assert (table, adoption) == ([1, 3], Adoption(7, [BlockCopy(2, 3)]))
    manager.end_copies(adoption.copies)
    manager.check_integrity([table])
    check_cache(manager)


def test_with_blocks_of_one_token_the_last_token_is_computed() -> None:
    manager = cached_manager(block_size=1)
    serve(manager, PROMPT[:3])
    table, _, adoption = start(manager, PROMPT[:3])
    assert (table, adoption) == ([1, 2, 4], Adoption(2, []))
    one, _, adoption = start(manager, PROMPT[:1])
    assert (one, adoption) == ([5], Adoption(0, []))


def test_prompts_that_differ_inside_a_block_share_the_part_before() -> None:
    manager = cached_manager()
    serve(manager, PROMPT)
    table, _, adoption = start(manager, [*PROMPT[:6], 1, 2, 3])
    assert (table, adoption) == ([1, 4, 5], Adoption(6, [BlockCopy(2, 4)]))


def test_a_hit_that_is_evicted_before_it_is_adopted_is_left_out() -> None:
    manager = cached_manager(num_blocks=5)
    serve(manager, PROMPT)
    chain = manager.prefixes.new_chain(PROMPT)
    match = manager.prefixes.match(chain)
    assert (match.blocks, match.num_tokens) == ([1, 2], 9)
    other: list[int] = []
    assert manager.grow(other, 9)
    assert other == [4, 3, 2]
    assert manager.adopt([], chain, match, 10) is None
    manager.free(other)
    table: list[int] = []
    assert manager.adopt(table, chain, match, 10) == Adoption(4, [])
    assert table == [1, 4, 3]
    manager.check_integrity([table])
    check_cache(manager)


def test_the_source_of_a_copy_is_held_until_the_copy_ends() -> None:
    manager = cached_manager(num_blocks=5)
    serve(manager, PROMPT[:8])
    table, chain, adoption = start(manager, PROMPT[:8])
    assert (table, adoption.copies) == ([1, 3], [BlockCopy(2, 3)])
    manager.free(table, chain)
    assert manager.num_free_blocks == 3
    others: list[int] = []
    assert not manager.grow(others, 13)
    assert manager.grow(others, 12)
    assert 2 not in others
    manager.check_integrity([others])
    manager.end_copies(adoption.copies)
    assert manager.grow(others, 13)
    assert others[-1] == 2
    with pytest.raises(AssertionError, match="the copy of block 2 to 3 has ended already"):
        manager.end_copies(adoption.copies)


def test_a_tail_is_not_used_if_its_source_is_the_last_free_block() -> None:
    manager = cached_manager(num_blocks=3)
    serve(manager, PROMPT[:8])
    table, _, adoption = start(manager, PROMPT[:8])
    assert (table, adoption) == ([1, 2], Adoption(4, []))


def test_without_copies_of_tails_only_a_free_block_with_the_same_tokens_is_continued() -> None:
    manager = KVCacheManager(16, 4, prefix_cache=True, copies_tails=False)
    serve(manager, PROMPT)
    table, chain, adoption = start(manager, [*PROMPT[:9], 1, 2])
    assert (table, adoption) == ([1, 2, 4], Adoption(8, []))
    manager.free(table, chain)
    table, chain, adoption = start(manager, [*PROMPT, 1, 2])
    assert (table, adoption) == ([1, 2, 3], Adoption(10, []))
    other, _, adoption = start(manager, [*PROMPT, 3])  # two sequences share the last block, so a write would copy it
    assert (other[:2], adoption) == ([1, 2], Adoption(8, []))
    manager.check_integrity([table, other])


def test_the_first_of_two_equal_blocks_is_found() -> None:
    manager = cached_manager()
    first, first_chain, _ = start(manager, PROMPT)
    second, second_chain, _ = start(manager, PROMPT)
    assert (first, second) == ([1, 2, 3], [4, 5, 6])
    manager.prefixes.commit(second, second_chain, 10)
    manager.prefixes.commit(first, first_chain, 10)
    assert manager.prefixes.match(manager.prefixes.new_chain(PROMPT)).blocks == [4, 5]
    manager.free(first, first_chain)
    assert len(manager._pool._free_cached) == 0
    manager.free(second, second_chain)
    assert len(manager._pool._free_cached) == 3
    manager.check_integrity([])
    check_cache(manager)


def test_the_second_of_two_equal_blocks_is_found_after_the_first_was_evicted() -> None:
    manager = cached_manager(num_blocks=6)
    first, first_chain, _ = start(manager, PROMPT[:8])
    second, second_chain, _ = start(manager, PROMPT[:8])
    manager.prefixes.commit(first, first_chain, 8)
    manager.prefixes.commit(second, second_chain, 8)
    manager.free(first, first_chain)
    other: list[int] = []
    assert manager.grow(other, 12)
    assert other == [5, 2, 1]
    second_chain.extend(range(4))
    manager.prefixes.commit(second, second_chain, 8)
    assert manager.prefixes.match(manager.prefixes.new_chain(PROMPT)).blocks == [3, 4]
    check_cache(manager)


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    manager = cached_manager()
    table, chain, _ = start(manager, PROMPT)
    chain.extend([1, 2, 3])
    assert manager.grow(table, 12)
    manager.prefixes.commit(table, chain, 12)
    manager.free(table, chain)
    again: list[int] = []
    match = manager.prefixes.match(chain)
    assert (match.blocks, match.num_tokens) == ([1, 2, 3], 12)
    assert manager.adopt(again, chain, match, 13) == Adoption(12, [])
    assert again == [1, 2, 3, 4]


def test_announced_blocks_are_pending() -> None:
    manager = cached_manager()
    table, chain, _ = start(manager, PROMPT)
    manager.prefixes.announce(chain, 6)
    assert manager.prefixes.match(manager.prefixes.new_chain(PROMPT)).num_pending_tokens == 4
    manager.prefixes.announce(chain, 10)
    late = manager.prefixes.match(manager.prefixes.new_chain(PROMPT))
    assert (late.num_tokens, late.num_pending_tokens, late.pending) == (0, 8, True)
    manager.prefixes.commit(table, chain, 6)
    half = manager.prefixes.match(manager.prefixes.new_chain(PROMPT))
    assert (half.num_tokens, half.num_pending_tokens) == (6, 4)
    manager.prefixes.commit(table, chain, 10)
    assert not manager.prefixes.match(manager.prefixes.new_chain(PROMPT)).pending


def test_announcements_of_a_failed_step_are_withdrawn() -> None:
    manager = cached_manager()
    table, chain, _ = start(manager, PROMPT)
    double, double_chain, _ = start(manager, PROMPT)
    manager.prefixes.announce(chain, 10)
    manager.prefixes.announce(double_chain, 4)
    manager.prefixes.withdraw(chain)
    assert manager.prefixes.match(manager.prefixes.new_chain(PROMPT)).num_pending_tokens == 4
    manager.free(double, double_chain)
    assert not manager.prefixes.match(manager.prefixes.new_chain(PROMPT)).pending
    manager.prefixes.announce(chain, 4)
    manager.free(table, chain)
    assert hit_tokens(manager, PROMPT) == 0
    manager.check_integrity([])


def test_the_check_finds_announcements_without_a_sequence() -> None:
    manager = cached_manager()
    table, chain, _ = start(manager, PROMPT)
    manager.prefixes.announce(chain, 10)
    manager.free(table)
    with pytest.raises(AssertionError, match="2 blocks are announced but no sequence computes them"):
        manager.check_integrity([])


def test_salts_share_nothing_and_do_not_evict_each_other(record_property: RecordProperty) -> None:
    manager = cached_manager()
    serve(manager, PROMPT, b"one")
    shared = hit_tokens(manager, PROMPT) + hit_tokens(manager, PROMPT, b"two")
    record_property("shared_tokens", f"{shared} of 2")
    assert shared == 0
    serve(manager, PROMPT, b"two")
    assert hit_tokens(manager, PROMPT, b"one") == hit_tokens(manager, PROMPT, b"two") == 9
    one, two = (manager.prefixes.new_chain(PROMPT, salt) for salt in (b"one", b"two"))
    assert one.hash_at(0) != two.hash_at(0)


@pytest.mark.parametrize("salt", [b"", b"salt"])
def test_a_planted_hash_collision_is_a_miss(salt: bytes, record_property: RecordProperty) -> None:
    manager = cached_manager(block_hash=lambda data: b"the same")
    serve(manager, PROMPT[:4])
    assert hit_tokens(manager, [*PROMPT[:4], 1]) == 4
    wrong = [hit_tokens(manager, [7, 7, 7, 7, 7], salt)]
    serve(manager, [7, 7, 7, 7], salt)
    assert hit_tokens(manager, [7, 7, 7, 7, 7], salt) == 4
    wrong.append(hit_tokens(manager, [*PROMPT[:4], 1]))
    record_property("wrong_hits", f"{sum(hit > 0 for hit in wrong)} of 2")
    assert wrong == [0, 0]
    check_cache(manager)


def test_equal_tokens_after_colliding_prefixes_are_different(record_property: RecordProperty) -> None:
    """The hashes of two first blocks collide.

    The second blocks have equal tokens, but must not match, as their prefixes differ.
    """

    def collides(data: bytes) -> bytes:
        return b"first" if b"\xc8\0\0\0" in data or b"\xc9\0\0\0" in data else blake2b_128(data)

    manager = cached_manager(num_blocks=5, block_size=2, block_hash=collides)
    serve(manager, [200, 1, 5, 6])
    table, chain, _ = start(manager, [201, 1])
    manager.prefixes.commit(table, chain, 2)
    found = hit_tokens(manager, [201, 1, 5, 6, 7])
    record_property("wrong_hits", f"{found != 2:d} of 1")
    assert found == 2


def test_drop_all_empties_the_cache_and_keeps_reference_counts() -> None:
    manager = cached_manager()
    serve(manager, [1, 2, 3, 4])
    table, chain, _ = start(manager, PROMPT)
    manager.prefixes.commit(table, chain, 4)
    waiting = manager.prefixes.new_chain(PROMPT)
    stale = manager.prefixes.match(waiting)
    assert stale.blocks == [2]
    manager.prefixes.drop_all()
    assert hit_tokens(manager, PROMPT) == hit_tokens(manager, [1, 2, 3, 4]) == 0
    manager.check_integrity([table])
    check_cache(manager)
    manager.prefixes.commit(table, chain, 10)
    assert hit_tokens(manager, PROMPT) == 0
    manager.free(table, chain)
    assert manager.num_free_blocks == 15
    again: list[int] = []
    assert manager.adopt(again, waiting, stale, 10) == Adoption(0, [])
    manager.prefixes.commit(again, waiting, 10)
    assert hit_tokens(manager, PROMPT) == 9


def test_a_chain_with_more_blocks_than_its_table_had_at_the_start() -> None:
    manager = cached_manager()
    late = manager.prefixes.new_chain(PROMPT)
    nothing = manager.prefixes.match(late)
    serve(manager, PROMPT)
    assert manager.prefixes.match(late).blocks == [1, 2]
    table: list[int] = []
    assert manager.adopt(table, late, nothing, 10) == Adoption(0, [])
    manager.prefixes.commit(table, late, 6)
    manager.free(table, late)
    assert hit_tokens(manager, [*PROMPT[:8], *PROMPT[4:6], 1]) == 8
    check_cache(manager)


def test_the_least_recently_freed_block_is_evicted_first_and_the_end_of_a_prefix_before_its_beginning() -> None:
    manager = cached_manager(num_blocks=7)
    serve(manager, PROMPT[:8])
    serve(manager, [1] * 8)
    serve(manager, [2] * 8)
    assert hit_tokens(manager, [*PROMPT[:8], 0]) == 8
    table: list[int] = []
    assert manager.grow(table, 4)
    assert [hit_tokens(manager, [*tokens, 0]) for tokens in (PROMPT[:8], [1] * 8, [2] * 8)] == [4, 8, 8]
    assert manager.grow(table, 12)
    assert [hit_tokens(manager, [*tokens, 0]) for tokens in (PROMPT[:8], [1] * 8, [2] * 8)] == [0, 4, 8]


def test_without_a_prefix_cache_there_are_no_chains() -> None:
    with pytest.raises(AssertionError, match="there is no prefix cache"):
        KVCacheManager(4, 4).prefixes.new_chain(PROMPT)
    assert KVCacheManager(4, 4).prefix_hit_tokens == 0
    with pytest.raises(ValueError, match="contiguous tables cannot share"):
        KVCacheManager(4, 4, prefix_cache=True, contiguous=True)


def test_a_table_of_full_blocks_uses_no_tail() -> None:
    manager = cached_manager()
    serve(manager, PROMPT)
    table: list[int] = []
    chain = manager.prefixes.new_chain(PROMPT)
    assert manager.adopt(table, chain, manager.prefixes.match(chain), 8) == Adoption(8, [])
    assert table == [1, 2]
    manager.check_integrity([table])


def test_the_latest_of_equal_tails_is_copied() -> None:
    manager = cached_manager()
    serve(manager, [1, 2, 3, 4])
    serve(manager, [1, 2, 5, 6])
    tail = manager.prefixes.match(manager.prefixes.new_chain([1, 2, 7, 8, 9])).tail
    assert tail is not None
    assert (tail.block, tail.num_tokens) == (2, 2)
