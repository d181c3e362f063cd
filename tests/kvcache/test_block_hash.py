from __future__ import annotations

import hashlib

from llm_serving.kvcache.block_hash import hash_blocks, pack_tokens, root_hash
from llm_serving.kvcache.kv_cache_manager import KVCacheManager


def test_tokens_are_little_endian_int32() -> None:
    assert pack_tokens([1, 258, -1]) == b"\1\0\0\0\2\1\0\0\xff\xff\xff\xff"


def test_each_full_block_is_hashed_with_its_parent() -> None:
    first = hashlib.blake2b(b"root" + pack_tokens([1, 2]), digest_size=16).digest()
    second = hashlib.blake2b(first + pack_tokens([3, 4]), digest_size=16).digest()
    assert hash_blocks([1, 2, 3, 4, 5], 2, b"root") == [first, second]
    assert hash_blocks([1], 2, b"root") == []


def test_namespace_and_salt_give_different_roots() -> None:
    assert len({root_hash(b"ab", b"c"), root_hash(b"a", b"bc"), root_hash(b"", b"abc"), root_hash(b"abc", b"")}) == 4


def test_a_chain_hashes_each_block_once() -> None:
    hashed: list[bytes] = []

    def counted(data: bytes) -> bytes:
        hashed.append(data)
        return hashlib.sha256(data).digest()

    manager = KVCacheManager(16, 2, prefix_cache=True, namespace=b"model", block_hash=counted)
    chain = manager.prefixes.new_chain([1, 2, 3], b"salt")
    manager.prefixes.match(chain)
    chain.extend([4, 5])
    for _ in range(3):
        manager.prefixes.match(chain)
        manager.prefixes.announce(chain, 5)
        manager.prefixes.withdraw(chain)
    assert [chain.hash_at(0), chain.hash_at(1)] == hash_blocks(
        [1, 2, 3, 4], 2, root_hash(b"model", b"salt", counted), counted
    )
    assert len(hashed) == 3 + 3
