from __future__ import annotations

from llm_serving.kvcache.kv_cache_manager import BlockCopy, KVCacheManager

PROMPT = list(range(100, 110))


def cached_manager(num_blocks: int = 16, block_size: int = 4) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, prefix_cache=True)


def serve(manager: KVCacheManager, tokens: list[int], salt: bytes = b"") -> list[int]:
    """Compute a sequence to its end and take its blocks back. Gives the table it had."""
    table, chain = [], manager.new_chain(tokens, salt)
    adoption = manager.adopt(table, chain, manager.match_prefix(chain), len(tokens))
    assert adoption is not None
    manager.end_copies(adoption.copies)
    manager.commit(table, chain, len(tokens))
    manager.free(table, chain)
    return table


def test_what_was_served_is_found_again() -> None:
    manager = cached_manager()
    assert serve(manager, PROMPT) == [1, 2, 3]
    table, chain = [], manager.new_chain([*PROMPT, 1, 2, 3])
    match = manager.match_prefix(chain)
    assert (match.blocks, match.num_tokens, match.pending) == ([1, 2], 10, False)
    adoption = manager.adopt(table, chain, match, 13)
    assert adoption is not None
    assert (adoption.num_tokens, adoption.copies, table) == (10, [], [1, 2, 3, 4])
    manager.check_integrity([table])
    manager.check_cache()


def test_a_prompt_cached_to_its_end_copies_the_last_block_less_one_token() -> None:
    manager = cached_manager()
    serve(manager, PROMPT[:8])
    table, chain = [], manager.new_chain(PROMPT[:8])
    match = manager.match_prefix(chain)
    assert (match.blocks, match.num_tokens) == ([1], 7)
    adoption = manager.adopt(table, chain, match, 8)
    assert adoption is not None
    assert (adoption.num_tokens, adoption.copies, table) == (7, [BlockCopy(2, 3)], [1, 3])
    manager.check_integrity([table])
    manager.end_copies(adoption.copies)
    manager.check_integrity([table])
    manager.check_cache()
