"""Hashes of blocks, chained: what a block's keys and values are is told by its tokens and all before them.

``H_0 = H(root, tokens of block 0)``, ``H_i = H(H_(i-1), tokens of block i)``, tokens as little-endian int32
(the chain of vLLM's automatic prefix caching, 2023; RadixAttention, Zheng et al. 2023, keeps a tree instead).
The root holds everything else that changes keys and values, or that must keep requests apart.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence

__all__ = ["TOKEN_BYTES", "BlockHash", "blake2b_128", "hash_blocks", "pack_tokens", "root_hash"]

TOKEN_BYTES = 4

BlockHash = Callable[[bytes], bytes]
"""From any bytes to a digest."""


def blake2b_128(data: bytes) -> bytes:
    """BLAKE2b with a digest of 16 bytes. For a block of 16 tokens it costs 0.33 us, SHA-256 0.34 us with digests
    of twice the size."""
    return hashlib.blake2b(data, digest_size=16).digest()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def root_hash(namespace: bytes, salt: bytes, block_hash: BlockHash = blake2b_128) -> bytes:
    """Where chains begin. ``namespace``: model, weights and format of the cache; ``salt``: who may share."""
    return block_hash(len(namespace).to_bytes(4, "little") + namespace + salt)


def hash_blocks(
    token_ids: Sequence[int], block_size: int, root: bytes, block_hash: BlockHash = blake2b_128
) -> list[bytes]:
    """The chained hashes of the full blocks of ``token_ids``; a last block that is not full has none."""
    packed, size, parent = pack_tokens(token_ids), block_size * TOKEN_BYTES, root
    hashes = []
    for start in range(0, len(packed) - size + 1, size):
        parent = block_hash(parent + packed[start : start + size])
        hashes.append(parent)
    return hashes
