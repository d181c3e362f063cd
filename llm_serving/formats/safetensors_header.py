"""Finds the shapes of named tensors in the headers of a folder's safetensors files, without reading values.

Damaged files are skipped here. The reader of weights (``agent.weights.safetensors_file``) reports them later.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

_LENGTH_BYTES = 8
"""Size in bytes of the number at the start of a safetensors file, which is the length of the header."""
_MAX_HEADER_BYTES = 100 * 1024 * 1024
"""Maximum size of the header of a safetensors file."""


def tensor_shapes(folder: Path, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors ``names``, if the folder's safetensors files contain them.

    Skips damaged files.
    """
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= _shapes_of(file, names)
        if len(found) == len(names):
            break
    return found


def _shapes_of(file: Path, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            if length > min(_MAX_HEADER_BYTES, file.stat().st_size):
                return {}
            header = json.loads(opened.read(length))
        return {name: tuple(map(int, header[name]["shape"])) for name in names if name in header}
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return {}
