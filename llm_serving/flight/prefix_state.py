"""The prefix cache in a recorded state: tokens become pseudonyms, and hashes are made anew when it is read.

Contents of cached blocks are written as the pseudonyms of their tokens, which need the tokens before them: those are in
the block's parents, which have smaller entry numbers. A block whose parent is no longer cached cannot be found any
more, and its content is left out. Hashes are not written: a replay has those of the pseudonyms.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

from llm_serving.flight.pseudonyms import Pseudonyms, TokenChain
from llm_serving.kvcache.block_hash import TOKEN_BYTES, pack_tokens, root_hash
from llm_serving.kvcache.prefix_cache import PrefixCache
from llm_serving.kvcache.prefix_chain import PrefixChain
from llm_serving.kvcache.prefix_index import PrefixIndex

__all__ = ["HASHED", "block_contents", "chain_tokens", "restore_prefixes"]

HASHED = b"#"
"""Stands for a block's hash."""


def block_contents(index: PrefixIndex, pseudonyms: Pseudonyms | None) -> list[bytes]:
    """The contents of all blocks, packed as ``PrefixIndex`` has them, in pseudonyms (without ``pseudonyms`` they are
    that already)."""
    contents = [b""] * len(index.entries)
    chains: dict[int, TokenChain | None] = {}
    for entry, block in sorted((entry, block) for block, entry in enumerate(index.entries) if entry):
        parent, content = index._parents[block], index._contents[block]
        if not isinstance(parent, bytes) and parent not in chains:
            contents[block] = bytes(len(content))
        elif pseudonyms is None:
            chains[entry], contents[block] = None, content
        else:
            before = pseudonyms.chain(parent) if isinstance(parent, bytes) else chains[parent]
            assert before is not None
            chain = chains[entry] = before.copy()
            contents[block] = pack_tokens(chain.extend(_unpack(content)))
    return contents


def chain_tokens(chain: PrefixChain, names: Sequence[int] | None, pseudonyms: Pseudonyms) -> bytes:
    """A chain's packed tokens in pseudonyms: the first of ``names``, which are of the request it belongs to."""
    if names is None:
        return pack_tokens(pseudonyms.chain(chain.salt).extend(_unpack(chain.tokens(0, chain.num_tokens))))
    return pack_tokens(names[: chain.num_tokens])


def restore_prefixes(objects: Sequence[Any]) -> int:
    """Give the prefix cache of a state that was read its hashes. Gives the number of blocks that cannot be found any
    more, for which there is none: where such a block would have been replaced, a replay may differ."""
    lost = 0
    for thing in objects:
        if isinstance(thing, PrefixCache):
            lost += _restore_index(thing)
            chains = [other for other in objects if isinstance(other, PrefixChain)]
            thing._announced = dict(Counter(block_hash for chain in chains for block_hash in _announced(chain)))
    return lost


def _restore_index(cache: PrefixCache) -> int:
    index, lost = cache._index, 0
    hashes: dict[int, bytes] = {}
    index._blocks = {}
    for entry, block in sorted((entry, block) for block, entry in enumerate(index.entries) if entry):
        if not index._hashes[block]:
            continue
        parent = index._parents[block]
        if isinstance(parent, bytes):
            before: bytes | None = root_hash(cache._namespace, parent, cache._block_hash)
        else:
            before = hashes.get(parent)
        lost += before is None
        content = index._contents[block] if before is not None else b"lost %d" % entry
        block_hash = hashes[entry] = cache._block_hash((before or b"") + content)
        index._hashes[block] = block_hash
        index._blocks[block_hash] = block
    return lost


def _announced(chain: PrefixChain) -> list[bytes]:
    return [chain.hash_at(place) for place in range(chain.announce_begin, chain.announce_end)]


def _unpack(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // TOKEN_BYTES}i", packed)
