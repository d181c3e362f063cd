"""Keeps the LoRA adapters that a node has received in files, so that later starts of agents need no transfer.

The name of a file is the SHA-256 of its content. A file whose content has another digest is removed and counts as
missing. Several nodes of a machine may share the folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from llm_serving.ipc.adapters import AdapterMemory

MAX_CACHE_BYTES = 4 << 30
"""Maximum total bytes of the files, including unfinished files. If a new file would exceed the maximum, the least
recently used files are deleted."""
_SUFFIX = ".adapter"
_UNFINISHED = ".part"
_UNFINISHED_AGE_S = 3600.0
"""Age in seconds after which the file of an unfinished write is removed: the node that wrote it was probably killed."""


class AdapterCache:
    """The adapter files in ``folder``. The user of this process owns them, and other users cannot read them."""

    def __init__(self, folder: Path, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def fill(self, memory: AdapterMemory, digest: bytes) -> bool:
        """Reads the adapter with ``digest`` into ``memory``. Returns False if there is no file with this content."""
        path = self._path(digest)
        try:
            with path.open("rb") as file:
                is_whole = memory.read_from(file) and memory.digest() == digest
            if is_whole:
                os.utime(path)
            else:
                path.unlink()
        except OSError:
            return False
        return is_whole

    def keep(self, memory: AdapterMemory, digest: bytes) -> None:
        """Writes an adapter to a file. Raises OSError if it cannot be written, or is larger than the limit."""
        if memory.num_bytes > self._max_bytes:
            raise OSError(f"it has {memory.num_bytes} bytes; the folder keeps at most {self._max_bytes}")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = self._folder / f"{secrets.token_hex(8)}{_UNFINISHED}"
        try:
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.truncate(memory.num_bytes)  # so other nodes already count the file's final size
                self._make_room()
                memory.write_to(file)
            unfinished.replace(self._path(digest))
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def _path(self, digest: bytes) -> Path:
        return self._folder / f"{digest.hex()}{_SUFFIX}"

    def _make_room(self) -> None:
        """Removes old files until all files, also the unfinished ones, fit. Another node may remove files at the same
        time.
        """
        found, total = [], 0
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):
                status = path.stat()
                if path.suffix == _UNFINISHED and status.st_mtime < time.time() - _UNFINISHED_AGE_S:
                    path.unlink()
                    continue
                if path.suffix == _SUFFIX:
                    found.append((status.st_mtime, status.st_size, path))
                if path.suffix in (_SUFFIX, _UNFINISHED):
                    total += status.st_size
        for _, size, path in sorted(found):
            if total <= self._max_bytes:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size
