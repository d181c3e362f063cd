"""Functions for private files in a private folder. They create files, replace them atomically, and append lines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

FOLDER_MODE = 0o700
FILE_MODE = 0o600
_NEW = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_BYTES = 1 << 20
"""Bytes that are read at a time from a file."""


def make_folder(path: Path) -> None:
    """Creates a folder that only this user can read. Missing parent folders are created, too."""
    path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)


def open_new(path: Path) -> int:
    """Creates a file for writing and returns its descriptor. Raises FileExistsError if the file exists."""
    return os.open(path, _NEW | os.O_EXCL, FILE_MODE)


def open_appending(path: Path) -> int:
    """Opens a file for appending, and creates it if it does not exist. Returns its descriptor."""
    return os.open(path, _NEW | os.O_APPEND, FILE_MODE)


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of ``data``. A loop is needed, because one call of ``os.write`` may write only a part."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace_file(path: Path, data: bytes) -> None:
    """Replaces the content of a file atomically. After a crash, the file has either the old or the new content."""
    part = path.with_suffix(".part")
    with contextlib.suppress(FileNotFoundError):
        part.unlink()
    descriptor = open_new(part)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flushes the entries of a folder to disk, so that a rename or a removal in it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cut_partial_line(path: Path) -> int:
    """Removes the last line of a file if a killed process has left it incomplete. Returns the new size of the file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    with open(descriptor, "r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - _READ_BYTES)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            if found >= 0:
                end = begin + found + 1
                break
            end = begin
        if end < size:
            file.truncate(end)
        return end


def lines_of(path: Path, max_bytes: int) -> Generator[tuple[int, bytes | None], None, None]:
    """Yields the number and the bytes of each line that is not empty. Numbers begin at 1.

    For a line with more than ``max_bytes`` bytes, yields None instead of the bytes.
    """
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(max_bytes + 2):
            number += 1
            is_long = len(line.rstrip(b"\r\n")) > max_bytes
            while is_long and not line.endswith(b"\n") and (line := file.readline(_READ_BYTES)):
                pass
            if is_long:
                yield number, None
            elif stripped := line.strip():
                yield number, stripped
