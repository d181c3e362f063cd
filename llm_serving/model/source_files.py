"""Describes the files of a model folder, so that other weights at the same path are recognised without a full read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_PATTERNS = ("*.safetensors", "*.gguf", "*.json")
_SAMPLE_BYTES = 1 << 20
"""Number of bytes that a digest covers at the start of a file, and also at the end of the file."""


def describe_files(place: Path) -> list[object]:
    """Returns the name, size, time and a digest of each file of a model folder, or of a single file.

    The digest covers the first and the last megabyte of the file.
    """
    files = [place] if place.is_file() else sorted(file for kind in _PATTERNS for file in place.glob(kind))
    return [_describe(file) for file in files]


def files_fingerprint(place: Path | None) -> str:
    """Returns a digest of the names, sizes and times of the files at ``place``, and of some of their bytes. Empty for a
    model without files.

    This function is fast, but misses a change in the middle of a file with an unchanged time.
    ``kvstore.identity.weights_digest`` reads all bytes.

    Raises OSError if a file cannot be read.
    """
    if place is None:
        return ""
    return hashlib.sha256(json.dumps(describe_files(place)).encode()).hexdigest()


def sample_digest(file: Path, num_bytes: int) -> str:
    """Returns a digest of the first and the last megabyte of a file with ``num_bytes`` bytes. Raises OSError."""
    with file.open("rb") as opened:
        sample = hashlib.sha256(opened.read(_SAMPLE_BYTES))
        opened.seek(max(0, num_bytes - _SAMPLE_BYTES))
        sample.update(opened.read(_SAMPLE_BYTES))
    return sample.hexdigest()


def _describe(file: Path) -> list[object]:
    found = file.stat()
    return [file.name, found.st_size, found.st_mtime_ns, sample_digest(file, found.st_size)]
