"""Keeps the logits of the beams of a search in a few arrays."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import overload

from llm_serving.engine.logit_columns import LogitColumns
from llm_serving.request import TokenLogits


class _Tree:
    """The tokens of all beams of one search. Beams that begin with the same tokens share them.

    The tokens and their alternatives are in arrays and not in Python objects. So the end of a search frees them
    quickly, and garbage collections need not visit them (see ``LogitColumns``).
    """

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self.entries = LogitColumns()
        self.parents = array("q")
        """For each token, the number of the token before it. -1 for the first token of an output."""


class BeamLogits(Sequence[TokenLogits]):
    """The logits of the tokens of one beam. Each ``TokenLogits`` object is made when it is read. So read each of them
    only once, and read many of them in another thread.
    """

    __slots__ = ("_last", "_length", "_tree")

    def __init__(self, tree: _Tree, last: int, length: int) -> None:
        self._tree, self._last, self._length = tree, last, length

    @classmethod
    def begin(cls, num_top: int) -> BeamLogits:
        """Returns the logits of the empty output that begins a search.

        Each token keeps its ``num_top`` most likely alternatives. This number limits the memory of the search.
        """
        return cls(_Tree(num_top), -1, 0)

    def extended(self, entry: TokenLogits) -> BeamLogits:
        """Returns the logits of this beam and one more token."""
        tree = self._tree
        tree.entries.extend([replace(entry, top=entry.top[: tree.num_top])])
        tree.parents.append(self._last)
        return BeamLogits(tree, len(tree.parents) - 1, self._length + 1)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[TokenLogits]:
        return (self._tree.entries[number] for number in self._numbers())

    @overload
    def __getitem__(self, index: int) -> TokenLogits: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenLogits]: ...

    def __getitem__(self, index: int | slice) -> TokenLogits | list[TokenLogits]:
        chosen = self._numbers()[index]
        return self._tree.entries[chosen] if isinstance(chosen, int) else [self._tree.entries[one] for one in chosen]

    def _numbers(self) -> list[int]:
        """Returns, for each token of the beam, its number in the tree."""
        numbers, number = [], self._last
        while number >= 0:
            numbers.append(number)
            number = self._tree.parents[number]
        numbers.reverse()
        return numbers
