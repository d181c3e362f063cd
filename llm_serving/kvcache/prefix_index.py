"""The index of cached blocks: their content, and lookups by hash or by prefix.

An *entry* describes the content of a block: its tokens and its *parent*. The parent is the entry of the block before it
in the sequence. The first block of a sequence has the salt as its parent. Entries have numbers, and no number is used
twice. So if a block still has the same entry number, it still has the same content.

A lookup by hash finds a candidate block, and then compares its tokens and its parent. The prefix cache looks up the
blocks of a sequence in order, beginning with the first. So two prefixes with the same hash are never confused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from llm_serving.kvcache.block_hash import TOKEN_BYTES, BlockHash

NO_ENTRY = 0
"""The entry of a block without content. Numbers of entries are positive."""

Parent = int | bytes
"""Identifies the prefix before a block: the index entry of the preceding block, or the salt if there is none."""

MAX_TAIL_CANDIDATES = 8
"""Maximum number of blocks with the same parent that ``find_tail`` compares. If there are more, it compares those that
were added last.
"""


class IndexObserver(Protocol):
    """The methods of an observer of the prefix cache, which learns which full blocks are in the index.

    The engine thread calls the methods, so they must be quick and must not raise. No decision of the scheduler may
    depend on an observer.
    """

    def stored(self, entry: int, block_hash: bytes, content: bytes, parent: Parent) -> None:
        """Learns that a full block was added. ``content`` has its tokens. ``parent``: see ``Parent``."""

    def removed(self, entry: int) -> None:
        """Learns that the full block with this entry was removed."""

    def cleared(self) -> None:
        """Learns that all blocks were removed. ``removed`` is not called for them."""


class PrefixIndex:
    """The index entries of the blocks ``0 .. num_blocks - 1``. ``BlockPool`` has their reference counts."""

    def __init__(self, num_blocks: int) -> None:
        self.observer: IndexObserver | None = None
        self.entries = [NO_ENTRY] * num_blocks
        """For each block, the number of its entry in this index."""
        self._parents: list[Parent] = [NO_ENTRY] * num_blocks
        self._contents: list[bytes] = [b""] * num_blocks
        self._hashes: list[bytes] = [b""] * num_blocks
        self._blocks: dict[bytes, int] = {}
        self._children: dict[Parent, list[int]] = {}
        self._num_entries = 0

    def block_of(self, block_hash: bytes) -> int | None:
        """Returns the block with this hash, or None. Does not compare the block's content."""
        return self._blocks.get(block_hash)

    def holds(self, block: int, content: bytes, parent: Parent) -> bool:
        """Returns True if ``block`` has the packed tokens ``content`` and follows the block with the entry ``parent``.
        """
        return self._contents[block] == content and self._parents[block] == parent

    def find(self, block_hash: bytes, content: bytes, parent: Parent) -> int | None:
        """Returns the full block that has the packed tokens ``content`` and the parent ``parent``, or None."""
        block = self._blocks.get(block_hash)
        return block if block is not None and self.holds(block, content, parent) else None

    def find_tail(self, parent: Parent, wanted: bytes) -> tuple[int, int] | None:
        """Finds the block after ``parent`` that begins with the most tokens of ``wanted``, a string of packed tokens.

        Returns the block and the number of matching tokens, or None if no block has a matching first token.
        """
        best, best_tokens = 0, 0
        for block in reversed(self._children.get(parent, ())):
            num_tokens = _common_tokens(self._contents[block], wanted)
            if num_tokens > best_tokens:
                best, best_tokens = block, num_tokens
        return (best, best_tokens) if best_tokens else None

    def described(self, block: int) -> tuple[bytes, bytes]:
        """Returns the chained hash of a cached full block, and its packed tokens."""
        return self._hashes[block], self._contents[block]

    def num_tokens(self, block: int) -> int:
        """Returns the number of tokens in a block's index entry."""
        return len(self._contents[block]) // TOKEN_BYTES

    def add(self, block: int, content: bytes, parent: Parent, block_hash: bytes = b"") -> None:
        """Adds an entry for a block that has none. A block that is not full has no hash."""
        if self.entries[block]:
            raise AssertionError(f"block {block} already has the entry {self.entries[block]}")
        self._num_entries += 1
        self.entries[block] = self._num_entries
        self._contents[block] = content
        self._parents[block] = parent
        self._hashes[block] = block_hash
        if block_hash:
            self._blocks[block_hash] = block
            if self.observer is not None:
                self.observer.stored(self._num_entries, block_hash, content, parent)
        siblings = self._children.setdefault(parent, [])
        siblings.append(block)
        if len(siblings) > MAX_TAIL_CANDIDATES:
            del siblings[0]

    def forget(self, block: int) -> None:
        """Removes the entry of a block.

        Lookups can then no longer find the blocks that follow this block in a sequence.
        """
        block_hash, parent = self._hashes[block], self._parents[block]
        if block_hash:
            del self._blocks[block_hash]
            self._hashes[block] = b""
            if self.observer is not None:
                self.observer.removed(self.entries[block])
        self.entries[block] = NO_ENTRY
        self._contents[block] = b""
        siblings = self._children.get(parent)
        if siblings is not None and block in siblings:
            siblings.remove(block)
            if not siblings:
                del self._children[parent]

    def in_order(self) -> Iterator[tuple[int, int, Parent, bytes]]:
        """Yields (entry, block, parent, content) of each cached block, in ascending order of the entry numbers."""
        for entry, block in sorted((entry, block) for block, entry in enumerate(self.entries) if entry):
            yield entry, block, self._parents[block], self._contents[block]

    def snapshot(self, contents: list[bytes]) -> dict[str, Any]:
        """Returns the entries as plain data, and for each parent the blocks that follow it, in order of their addition.

        ``contents[block]`` replaces the tokens of a block. For example, a flight recording has pseudonyms there.
        The data state whether a block has a hash, but do not have the hash itself. ``restore`` computes it from
        ``contents``.
        """
        return {
            "entries": self.entries.copy(),
            "parents": self._parents.copy(),
            "contents": contents,
            "hashed": bytes(map(bool, self._hashes)),
            "children": [[parent, blocks.copy()] for parent, blocks in self._children.items()],
            "num_entries": self._num_entries,
        }

    def restore(self, state: dict[str, Any], block_hash: BlockHash, root: Callable[[bytes], bytes]) -> int:
        """Restores the state that ``snapshot`` returned, and computes the hashes. ``root`` returns the root hash of a
        salt.

        Returns the number of blocks that lookups can no longer find, because the block before them is not cached.
        """
        self.entries, self._parents, self._contents = state["entries"], state["parents"], state["contents"]
        self._children = dict(state["children"])
        self._num_entries = state["num_entries"]
        self._hashes, self._blocks = [b""] * len(self.entries), {}
        hashes: dict[Parent, bytes] = {}
        num_lost = 0
        for entry, block, parent, content in self.in_order():
            if not state["hashed"][block]:
                continue
            before = root(parent) if isinstance(parent, bytes) else hashes.get(parent)
            if before is None:
                num_lost += 1
                content = b"lost %d" % entry
            self._hashes[block] = hashes[entry] = block_hash((before or b"") + content)
            self._blocks[self._hashes[block]] = block
        return num_lost


def _common_tokens(left: bytes, right: bytes) -> int:
    """Returns the number of equal tokens at the beginning of ``left`` and ``right``, which are packed tokens."""
    size = min(len(left), len(right))
    difference = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
    if not difference:
        return size // TOKEN_BYTES
    lowest_bit = (difference & -difference).bit_length() - 1
    return lowest_bit // (8 * TOKEN_BYTES)
