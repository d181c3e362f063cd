"""The header of a handed block, which identifies the content that the block must have.

    namespace (8 bytes)     digest of the model, its weights and the format of the KV cache
    chained hash (16 bytes) of the block's tokens, all tokens before them, and the request's salt
    generation (8 bytes)    number of the hand-over. No number is used twice in a run of the server.

The agent that writes a block also stores the header and a checksum of the content. The agent that reads the block gets
the expected header from the server. It compares both headers, and checks the checksum of its copy.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from llm_serving.kvcache.block_hash import blake2b_128, hash_blocks, pack_tokens, root_hash

_HEADER = struct.Struct("<8s16sQ")
HEADER_BYTES = _HEADER.size


def pack_header(namespace: bytes, chained_hash: bytes, generation: int) -> bytes:
    """Returns a header of HEADER_BYTES bytes. ``namespace`` has 8 bytes and ``chained_hash`` 16."""
    return _HEADER.pack(namespace, chained_hash, generation)


def namespace_digest(namespace: bytes) -> bytes:
    """Returns the 8 bytes that stand for a namespace (``SchedulerLimits.cache_namespace``) in headers."""
    return blake2b_128(namespace)[:8]


def block_hashes(token_ids: Sequence[int], block_size: int, namespace: bytes, salt: bytes) -> list[bytes]:
    """Returns the chained hashes of all blocks of ``token_ids``. The last block may have fewer tokens."""
    root = root_hash(namespace, salt)
    hashes = hash_blocks(token_ids, block_size, root)
    rest = token_ids[len(hashes) * block_size :]
    if rest:
        hashes.append(blake2b_128((hashes[-1] if hashes else root) + pack_tokens(rest)))
    return hashes
