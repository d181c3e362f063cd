"""What cached blocks hold, and how to find them.

An *entry* says what the keys and values in a block are of: the block's tokens, and what came before, named by
the entry of the block before (for a first block by the salt). Entries are numbered and a number is never used
twice, so an entry number that is still the block's says that the block still holds what it held.

Hashes only lead to a block. A hit is a block whose own tokens and whose parent's entry are those asked for, and so,
block by block from the first, whose whole prefix is: two prefixes of one hash cannot be taken for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llm_serving.kvcache.block_hash import TOKEN_BYTES, BlockHash

__all__ = ["NO_ENTRY", "Parent", "PrefixIndex"]

NO_ENTRY = 0
"""Numbers of entries are true."""

Parent = int | bytes
"""The entry of the block before, or the salt where there is none."""

MAX_TAIL_CANDIDATES = 8
"""Blocks that may follow one prefix and are looked at for a common beginning: the latest so many."""


class PrefixIndex:
    """Entries of the blocks ``0 .. num_blocks - 1``. Knows nothing of who holds a block."""

    def __init__(self, num_blocks: int) -> None:
        self.entries = [NO_ENTRY] * num_blocks
        """By block."""
        self._parents: list[Parent] = [NO_ENTRY] * num_blocks
        self._contents: list[bytes] = [b""] * num_blocks
        self._hashes: list[bytes] = [b""] * num_blocks
        self._blocks: dict[bytes, int] = {}
        self._children: dict[Parent, list[int]] = {}
        self._num_entries = 0

    def block_of(self, block_hash: bytes) -> int | None:
        """The block found under a hash, whatever it holds."""
        return self._blocks.get(block_hash)

    def holds(self, block: int, content: bytes, parent: Parent) -> bool:
        return self._contents[block] == content and self._parents[block] == parent

    def find(self, block_hash: bytes, content: bytes, parent: Parent) -> int | None:
        """The full block that holds ``content`` after ``parent``."""
        block = self._blocks.get(block_hash)
        return block if block is not None and self.holds(block, content, parent) else None

    def find_tail(self, parent: Parent, wanted: bytes) -> tuple[int, int] | None:
        """The block after ``parent`` that begins with most of ``wanted``, and with how many tokens of it."""
        best, best_tokens = 0, 0
        for block in reversed(self._children.get(parent, ())):
            num_tokens = _common_tokens(self._contents[block], wanted)
            if num_tokens > best_tokens:
                best, best_tokens = block, num_tokens
        return (best, best_tokens) if best_tokens else None

    def num_tokens(self, block: int) -> int:
        """Tokens of a block that its entry tells."""
        return len(self._contents[block]) // TOKEN_BYTES

    def add(self, block: int, content: bytes, parent: Parent, block_hash: bytes = b"") -> None:
        """A new entry for a block that has none. A block that is not full has no hash."""
        if self.entries[block]:
            raise AssertionError(f"block {block} has the entry {self.entries[block]} already")
        self._num_entries += 1
        self.entries[block] = self._num_entries
        self._contents[block] = content
        self._parents[block] = parent
        self._hashes[block] = block_hash
        if block_hash:
            self._blocks[block_hash] = block
        siblings = self._children.setdefault(parent, [])
        siblings.append(block)
        if len(siblings) > MAX_TAIL_CANDIDATES:
            del siblings[0]

    def forget(self, block: int) -> None:
        """The block holds nothing any more. What follows it cannot be reached from now on."""
        self.entries[block] = NO_ENTRY
        block_hash, parent = self._hashes[block], self._parents[block]
        if block_hash:
            del self._blocks[block_hash]
            self._hashes[block] = b""
        self._contents[block] = b""
        siblings = self._children.get(parent)
        if siblings is not None and block in siblings:
            siblings.remove(block)
            if not siblings:
                del self._children[parent]

    def in_order(self) -> Iterator[tuple[int, int, Parent, bytes]]:
        """Yields entry, block, parent and content of each cached block, in the order of the entries."""
        for entry, block in sorted((entry, block) for block, entry in enumerate(self.entries) if entry):
            yield entry, block, self._parents[block], self._contents[block]

    def snapshot(self, contents: list[bytes]) -> dict[str, Any]:
        """Returns the entries and the order of the children. ``contents`` replaces the tokens of each block.

        Hashes depend on the tokens, so only their presence is saved."""
        return {
            "entries": self.entries.copy(),
            "parents": self._parents.copy(),
            "contents": contents,
            "hashed": bytes(map(bool, self._hashes)),
            "children": [[parent, blocks.copy()] for parent, blocks in self._children.items()],
            "num_entries": self._num_entries,
        }

    def restore(self, state: dict[str, Any], block_hash: BlockHash, root: Callable[[bytes], bytes]) -> int:
        """Restores what ``snapshot`` returned and computes the hashes. ``root`` returns the root hash of a salt.

        Returns the number of blocks that cannot be found any more, because the block before them is not cached."""
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

    def check_integrity(self) -> None:
        """Raises AssertionError unless hashes, children and entries tell the same."""
        for block_hash, block in self._blocks.items():
            if not self.entries[block] or self._hashes[block] != block_hash:
                raise AssertionError(f"block {block} is found under a hash that is not its own")
        if sum(map(bool, self._hashes)) != len(self._blocks):
            raise AssertionError("a block has a hash under which it is not found")
        for parent, blocks in self._children.items():
            if any(not self.entries[block] or self._parents[block] != parent for block in blocks):
                raise AssertionError(f"blocks {blocks} are kept as what follows {parent!r} but do not")


def _common_tokens(left: bytes, right: bytes) -> int:
    """With how many equal tokens both begin."""
    size = min(len(left), len(right))
    difference = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
    if not difference:
        return size // TOKEN_BYTES
    lowest_bit = (difference & -difference).bit_length() - 1
    return lowest_bit // (8 * TOKEN_BYTES)
