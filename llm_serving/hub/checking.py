"""Checks a download: the free space before it, and the hash of each file after it."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from llm_serving.errors import HubError
from llm_serving.hub.selection import RemoteFile
from llm_serving.planning.rank_memory import format_bytes

_CHUNK = 4 * 1024 * 1024
"""Bytes that are read at a time for the hash of a file."""
_SPARE_BYTES = 64 * 1024 * 1024
"""Bytes that must remain free on the disk after a download."""


def check_free_space(folder: Path, needed: int) -> None:
    """Raises HubError if ``folder``'s disk has too little free space for ``needed`` bytes. The folder may not exist."""
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    if needed + _SPARE_BYTES > free:
        raise HubError(
            f"the download needs {format_bytes(needed)}, and {existing} has {format_bytes(free)} of free space; "
            "free some, or set HF_HOME or MODELSCOPE_CACHE to a folder on a larger disk"
        )


def check_content(file: Path, expected: RemoteFile) -> None:
    """Raises HubError if the size or the hash of a downloaded file differs from that on the hub."""
    size = file.stat().st_size
    if size != expected.size:
        raise HubError(f"{expected.path}: {size} bytes arrived, of {expected.size}")
    if expected.sha256 is not None:
        digest, stated, name = hashlib.sha256(), expected.sha256, "SHA-256"
    elif expected.git_sha1 is not None:
        # git names a file by the SHA-1 of its length and content
        digest, stated, name = hashlib.sha1(f"blob {size}\0".encode()), expected.git_sha1, "git hash"  # noqa: S324
    else:
        return
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != stated.lower():
        raise HubError(
            f"{expected.path}: the {name} of the downloaded file is {digest.hexdigest()}, and the hub states {stated}; "
            "the file was removed; try again"
        )
