"""Chained hashes of blocks. The hash of a block depends on its tokens and on all tokens before them.

``H_0 = H(root, tokens of block 0)`` and ``H_i = H(H_(i-1), tokens of block i)``, with tokens as little-endian int32.
(vLLM's automatic prefix caching, 2023, uses this chain. RadixAttention, Zheng et al. 2023, uses a tree.) ``root`` is a
hash of the model, the weights and the cache format, and of the request's salt.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence

TOKEN_BYTES = 4
"""Bytes of a packed token."""

BlockHash = Callable[[bytes], bytes]
"""Type of a function that returns the digest of bytes."""


def blake2b_128(data: bytes) -> bytes:
    """Returns the BLAKE2b digest of ``data``, with 16 bytes. The digest of a block of 16 tokens takes 0.33 us."""
    return hashlib.blake2b(data, digest_size=16).digest()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Returns token ids packed as little-endian int32."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def root_hash(namespace: bytes, salt: bytes, block_hash: BlockHash = blake2b_128) -> bytes:
    """Returns the root of a chain of block hashes. Only requests with equal roots share blocks.

    Keys and values depend on the tokens, the model, the weights and the cache format. ``namespace`` identifies all of
    these except the tokens. ``salt`` is a value of the request. Requests with different salts share no blocks.
    """
    return block_hash(len(namespace).to_bytes(4, "little") + namespace + salt)


def hash_blocks(
    token_ids: Sequence[int], block_size: int, root: bytes, block_hash: BlockHash = blake2b_128
) -> list[bytes]:
    """Returns the chained hashes of the full blocks of ``token_ids``."""
    packed, size, parent = pack_tokens(token_ids), block_size * TOKEN_BYTES, root
    hashes = []
    for start in range(0, len(packed) - size + 1, size):
        parent = block_hash(parent + packed[start : start + size])
        hashes.append(parent)
    return hashes
