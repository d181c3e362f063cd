"""Marks in a shared folder. A mark shows other machines that the blocks of a server may have wrong values.

    FOLDER/<namespace>/distrusted/<writer>    a mark: an empty file

A writer is a number that a server draws at random when it opens the folder. Each block that the server writes contains
this number. If a self-check fails, the server makes a mark with its number, removes its blocks and draws a new number.
After its next look at the marks, no machine uses blocks of a marked writer. A machine may have read blocks of this
writer before the mark was made. The blocks that it has computed from them may be wrong, too. This is called a doubt.

Making a file is atomic, also on network file systems, and no machine removes marks. So each machine sees every mark at
its next look. If a mark cannot be made, for example in a full folder, the server tries again with each look.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

_FOLDER = "distrusted"
_WRITER_BITS = 64
"""Size of the random number of a writer, in bits."""


class DistrustMarks:
    """Reads the marks in the folder of a namespace, and makes the marks of this server."""

    def __init__(self, folder: Path) -> None:
        """``folder`` must exist."""
        self._folder = folder / _FOLDER
        self._marked: frozenset[int] = frozenset()
        self.are_known = False
        """True if the last call of ``look`` could read the marks. Otherwise no block may be used."""
        self._sources: set[int] = set()
        """The writers of the blocks that this machine has read since ``look`` last returned True."""
        self.own = _new_writer()
        """The writer number of this server."""
        self._unmade: set[int] = set()
        """Former writer numbers of this server for which it could not make a mark yet."""

    def look(self) -> bool:
        """Reads the marks that all machines have made. First tries again to mark this server's former writer numbers
        that it could not mark before.

        Returns True if this machine has read blocks of a writer that is marked now. This is a doubt. The next call
        returns False unless there is another doubt. Raises OSError if the folder cannot be read.
        """
        with contextlib.suppress(OSError):  # the caller of mark_own has reported the first failure
            self._make()
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:  # no machine has made a mark
            self.are_known = True
            return False
        except OSError:
            self.are_known = False
            raise
        self.are_known = True
        self._marked = frozenset(filter(None, map(_writer_of, names)))
        has_doubt = not self._sources.isdisjoint(self._marked)
        if has_doubt:
            self._sources.clear()
        return has_doubt

    def accepts(self, writer: int) -> bool:
        """Returns False if this writer is marked, so that its blocks must not be used.

        Otherwise remembers that this machine has read a block of the writer. If the writer is marked later, ``look``
        then returns True.
        """
        if writer in self._marked:
            return False
        self._sources.add(writer)
        return True

    def mark_own(self) -> None:
        """Marks the blocks that this machine has written, and draws a new number.

        Raises OSError if the mark cannot be made. ``look`` then tries again.
        """
        writer, self.own = self.own, _new_writer()
        self._sources.discard(writer)  # the caller has already forgotten all blocks that this machine has written
        self._unmade.add(writer)
        self._make()

    def _make(self) -> None:
        """Makes the marks that are not made yet. Raises OSError for the first one that cannot be made."""
        if self._unmade:
            self._folder.mkdir(mode=0o700, exist_ok=True)
        for writer in sorted(self._unmade):
            (self._folder / f"{writer:016x}").touch()
            self._unmade.remove(writer)


def _new_writer() -> int:
    return secrets.randbits(_WRITER_BITS) or 1


def _writer_of(name: str) -> int:
    """Returns the writer of a mark, or 0 for a file that is no mark. Only blocks of older versions have writer 0."""
    with contextlib.suppress(ValueError):
        return int(name, 16)
    return 0
