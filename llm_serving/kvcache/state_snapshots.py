"""Assigns the device's snapshots of linear attention states to prefixes of token sequences.

A snapshot has the state of a sequence after its first full blocks, so that another sequence with the same blocks can
resume there. A snapshot belongs to the index entry of the last of these blocks. An entry identifies all tokens up to
the end of its block. When the block leaves the prefix cache, or the agent is lost, no lookup finds the entry again. The
snapshot is then evicted before the snapshots of cached blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

from llm_serving.kvcache.prefix_index import PrefixIndex

MAX_COMPARED = 64
"""Maximum number of published snapshots that ``take`` compares to find one whose block is no longer cached."""


class StateSnapshots:
    """The snapshots ``0 .. num_snapshots - 1``.

    A snapshot is free, or taken by a sequence whose steps save a state in it, or published for other sequences. The
    least recently used published snapshot is evicted first, but never one that a step in flight reads.
    """

    def __init__(self, num_snapshots: int, index: PrefixIndex) -> None:
        self.num_snapshots = num_snapshots
        self._index = index
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._published: dict[int, tuple[int, int]] = {}
        """The block and the snapshot of each entry, the least recently used first."""
        self._holds: Counter[int] = Counter()
        """For each snapshot: number of sequences whose first step reads the snapshot and has not completed."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def longest(self, entries: Sequence[int]) -> int:
        """Returns the length, in blocks, of the longest prefix with a published snapshot at its end.

        A sequence can resume at this snapshot. The result is 0 if the sequence must begin at token 0. ``entries`` has
        the index entries of the prompt's first blocks, in order.
        """
        published = self._published
        return next((number for number in range(len(entries), 0, -1) if entries[number - 1] in published), 0)

    def hold(self, entry: int) -> int:
        """Returns the snapshot of an entry, and holds it until ``let_go``. The snapshot becomes the most recently used.
        """
        block, snapshot = self._published.pop(entry)
        self._published[entry] = block, snapshot
        self._holds[snapshot] += 1
        return snapshot

    def let_go(self, snapshot: int) -> None:
        """Removes a hold. The step that reads the snapshot has completed, or will never run."""
        self._holds[snapshot] -= 1
        if not self._holds[snapshot]:
            del self._holds[snapshot]

    def take(self) -> int | None:
        """Returns a snapshot in which a step may save a state, or None if sequences need all snapshots.

        If no snapshot is free, evicts a published one. Prefers a snapshot whose block has left the prefix cache, among
        the ``MAX_COMPARED`` least recently used snapshots. Otherwise evicts the least recently used snapshot.
        """
        if self._free:
            return self._free.pop()
        index, holds = self._index.entries, self._holds
        free = (each for each in self._published.items() if each[1][1] not in holds)
        oldest = list(islice(free, MAX_COMPARED))
        if not oldest:
            return None
        entry = next((entry for entry, (block, _) in oldest if index[block] != entry), oldest[0][0])
        return self._published.pop(entry)[1]

    def give_back(self, snapshot: int) -> None:
        """Frees a taken snapshot without publishing it."""
        self._free.append(snapshot)

    def publish(self, entry: int, block: int, snapshot: int) -> None:
        """Publishes a taken snapshot: it has the state after ``block``, the cached block with this index entry.

        If the entry already has a snapshot, the new snapshot is freed. Both contain the same state.
        """
        known = self._published.pop(entry, None)
        if known is not None:
            self.give_back(snapshot)
        self._published[entry] = known or (block, snapshot)

    def snapshot(self) -> dict[str, Any]:
        """Returns the state of this object as plain data, from which ``restore`` restores it."""
        published = [[entry, block, number] for entry, (block, number) in self._published.items()]
        holds = [list(each) for each in self._holds.items()]
        return {"free": self._free.copy(), "published": published, "holds": holds}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the state that ``snapshot`` returned."""
        self._free = state["free"]
        self._published = {entry: (block, number) for entry, block, number in state["published"]}
        self._holds = Counter(dict(state["holds"]))

    def check_integrity(self, taken: Sequence[int]) -> None:
        """Raises AssertionError unless each snapshot is free, in ``taken`` or published, and all held ones are
        published.
        """
        published = [snapshot for _, snapshot in self._published.values()]
        found = sorted([*self._free, *taken, *published])
        if found != list(range(self.num_snapshots)) or not self._holds.keys() <= set(published):
            raise AssertionError(f"of {self.num_snapshots} snapshots, these are free, taken or published: {found}")
