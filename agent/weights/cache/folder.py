"""The folder of converted weights: finds the file of an agent, writes new files, and limits their total size."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from agent.folders import weight_cache_folder
from agent.weights.cache.entry import EntryError, EntryWriter, read_entry
from agent.weights.cache.fingerprint import fingerprint, slot_name
from agent.weights.storage import Array
from llm_serving.config import Config
from llm_serving.config.draft_model import Head
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import estimate_rank_memory
from llm_serving.planning.rank_memory import WEIGHTS

logger = logging.getLogger("agent.weights.cache")

GIB = 1024**3
_KINDS = ("*.weights", "*.program")
"""Patterns of the names of all complete files: converted weights and stored programs."""
FREE_DISK_BYTES = 2 * GIB
"""Number of bytes of the disk that must stay free after a new entry is written."""


class ArrayCache:
    """One cache file of an agent. It holds arrays that the agent computes itself if there is no valid file.

    All agents of a user share the folder of these files. If reading or writing a file fails, the reason is logged, and
    the agent starts without the cache.
    """

    def __init__(
        self, config: Config, what: str, name: str, make_fingerprint: Callable[[], str], used: set[Path] | None = None
    ) -> None:
        """``what`` describes the arrays in the log. ``name`` is the name of the file.

        ``make_fingerprint`` returns a digest of everything on which the arrays depend. ``used`` are the files that this
        start has read or written. They are not deleted to make space. The file of this object is added when it is used.
        """
        model = config.model_config
        self._limit = model.weight_cache_gib * GIB
        self._folder = weight_cache_folder(config)
        self._threads = min(16, len(os.sched_getaffinity(0)))
        self._pending: Future[dict[str, Array] | None] | None = None
        self._what = what
        self._path = self._folder / name
        self._fingerprint = make_fingerprint
        self._used = set() if used is None else used

    def begin_load(self) -> None:
        """Begins to read the file in a thread, while the caller imports MindSpore. ``load`` later returns the arrays.

        Does nothing if there is no file.
        """
        if self.has_entry:
            pool = ThreadPoolExecutor(1, thread_name_prefix="weight-cache")
            self._pending = pool.submit(self._load)
            pool.shutdown(wait=False)

    @property
    def has_entry(self) -> bool:
        """True if there is a file for this agent. The file may be damaged or outdated nevertheless."""
        return self.is_on and self._path.is_file()

    @property
    def is_on(self) -> bool:
        """Whether the config lets this agent use the cache."""
        return self._limit > 0

    def load(self) -> dict[str, Array] | None:
        """Returns the arrays of the file in new memory, or None if there is no valid file.

        A damaged or outdated file is deleted, and the reason is logged.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            return pending.result()
        return self._load() if self.is_on else None

    def _load(self) -> dict[str, Array] | None:
        path, began = self._path, time.perf_counter()
        try:
            _check_private(self._folder)
            arrays = read_entry(path, self._fingerprint(), self._threads)
            # The file's time is the time of its last use. The least recently used files are deleted first.
            os.utime(path)
            self._used.add(path)
        except FileNotFoundError:
            return None
        except EntryError as problem:
            logger.warning("the %s in %s are not used: %s; they are made again", self._what, path, problem)
            self.delete()
            return None
        except OSError as problem:
            logger.warning("the %s in %s cannot be read: %s", self._what, path, problem)
            return None
        num_bytes, seconds = sum(array.nbytes for array in arrays.values()), time.perf_counter() - began
        logger.info("read %.2f GiB of %s from %s in %.2f s", num_bytes / GIB, self._what, path, seconds)
        return arrays

    def delete(self) -> None:
        """Deletes the file, because its contents cannot be used."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    @contextlib.contextmanager
    def keeping(self, size: int) -> Iterator[Callable[[str, Array], None]]:
        """Writes the file while the ``with`` block computes the arrays. Yields a function (name, array) that adds an
        array to the file.

        ``size`` estimates the bytes of all arrays. The least recently used files are deleted to make space. If the
        ``with`` block raises, no file is kept. The arrays must not change before the block ends.
        """
        if not self.is_on:
            yield _drop
            return
        try:
            descriptor, path = self._open_new(size)
        except OSError as problem:
            logger.warning("the %s cannot be written to %s: %s", self._what, self._folder, problem)
            descriptor, path = -1, None
        if path is None:
            yield _drop
            return
        writer = EntryWriter(descriptor, self._fingerprint())
        try:
            yield writer.add
            self._complete(writer, path)
        finally:
            writer.close()
            os.close(descriptor)
            path.unlink(missing_ok=True)

    def _open_new(self, size: int) -> tuple[int, Path | None]:
        """Opens and locks a new file in the folder. Returns its descriptor and its path.

        The path is None if there is no space for a file of ``size`` bytes.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_private(self._folder)
        with self._locked():
            if not self._make_space(size):
                return -1, None
            descriptor, name = tempfile.mkstemp(prefix="new-", suffix=".tmp", dir=self._folder)
            # Other agents delete unfinished files, but not while a file is locked (``_delete_unless_locked``).
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor, Path(name)

    def _complete(self, writer: EntryWriter, path: Path) -> None:
        began = time.perf_counter()
        try:
            size = writer.finish()
            os.replace(path, self._path)
            self._used.add(self._path)
        except OSError as problem:
            logger.warning("the %s cannot be written to %s: %s", self._what, self._folder, problem)
            return
        seconds = time.perf_counter() - began
        text = "kept %.2f GiB of %s in %s; the start waited %.1f s for the disk"
        logger.info(text, size / GIB, self._what, self._path, seconds)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds a lock, so that only one agent at a time deletes files to make space."""
        descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _make_space(self, size: int) -> bool:
        """Deletes old files until a new file of ``size`` bytes fits the configured limit and the disk.

        Returns False if the new file cannot fit in addition to the files that this start uses.
        """
        own, used, all_entries = self._path, self._used - {self._path}, self._entries()
        entries = [(path, file_size) for path, file_size in all_entries if path not in used]
        in_use = sum(file_size for path, file_size in all_entries if path in used)
        if in_use + size > self._limit:
            self._log_no_space(size, in_use, f"model_config.weight_cache_gib is {self._limit // GIB}")
            return False
        if self._free_disk() + sum(file_size for _, file_size in entries) < size + FREE_DISK_BYTES:
            self._log_no_space(size, in_use, f"the disk has {self._free_disk() / GIB:.2f} GiB free")
            return False
        total = in_use + sum(file_size for path, file_size in entries if path != own)
        while entries and (total + size > self._limit or self._free_disk() < size + FREE_DISK_BYTES):
            path, file_size = entries.pop(0)
            total -= 0 if path == own else file_size
            path.unlink(missing_ok=True)
            logger.info("deleted %s, to make space for new %s", path, self._what)
        if self._free_disk() >= size + FREE_DISK_BYTES:
            return True
        self._log_no_space(size, in_use, f"the disk has {self._free_disk() / GIB:.2f} GiB free")
        return False

    def _log_no_space(self, size: int, in_use: int, limit: str) -> None:
        """Logs that a file of ``size`` bytes is not kept. ``in_use`` are the bytes of files that this start uses."""
        beside = f" beside {in_use / GIB:.2f} GiB of other files of this start" if in_use else ""
        text = "the %s for %s need %.2f GiB%s, and %s; they are not kept"
        logger.warning(text, self._what, self._path.name, size / GIB, beside, limit)

    def _entries(self) -> list[tuple[Path, int]]:
        """Returns the paths and sizes of all files, the least recently used first.

        Also deletes unfinished files of agents that have ended.
        """
        for path in self._folder.glob("new-*.tmp"):
            _delete_unless_locked(path)
        found = []
        for path in (path for kind in _KINDS for path in self._folder.glob(kind)):
            with contextlib.suppress(FileNotFoundError):
                state = path.stat()
                found.append((state.st_mtime, path, state.st_size))
        return [(path, size) for _, path, size in sorted(found)]

    def _free_disk(self) -> int:
        return shutil.disk_usage(self._folder).free


class WeightCache(ArrayCache):
    """The converted weights of one agent."""

    def __init__(
        self, config: Config, rank: int, used: set[Path] | None = None, head: Head | None = None
    ) -> None:
        """``rank`` is the agent's number among all agents. ``ArrayCache`` describes ``used``.

        ``head`` is given if ``config`` is the config of a head.
        """
        name = slot_name(config, rank, head)
        super().__init__(config, "converted weights", name, lambda: fingerprint(config, rank, head), used)
        self._config, self._rank = config, rank

    @contextlib.contextmanager
    def keeping(self, size: int | None = None) -> Iterator[Callable[[str, Array], None]]:
        """Writes the file and yields the function that adds an array, as ``ArrayCache.keeping`` does.

        ``size`` is the expected number of bytes. If it is None, the memory plan's estimate for weights is used.
        """
        if size is None:
            size = estimate_rank_memory(self._config, self._rank, Machine(0, "")).bytes_of(WEIGHTS)
        with super().keeping(size) as keep:
            yield keep


def _drop(name: str, array: Array) -> None:
    """Does nothing. ``keeping`` yields this function if the cache is off or has no space."""


def _check_private(folder: Path) -> None:
    """Raises OSError unless the folder belongs to this user and no other user can write to it."""
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} must belong to this user, and no other user may write to it (chmod 700)")


def _delete_unless_locked(path: Path) -> None:
    """Deletes an unfinished file whose writer has ended. A running writer holds a lock on its file."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(descriptor)
