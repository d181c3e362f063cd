"""Writes the weights of a model folder as safetensors files (shards), with an index if there are several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from agent.weights.tensor_files import INDEX_FILE, SINGLE_FILE
from performance.models.folders import write_safetensors

MAX_SHARD_BYTES = 1024**3
"""Maximum size of a safetensors file. The writer keeps the current file in memory."""


class FolderWriter:
    """Collects tensors and writes them as shards.

    The name of a shard contains the number of all shards, which is known only at the end. So ``close`` renames them.
    """

    def __init__(self, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._folder = folder
        self._max_shard_bytes = max_shard_bytes
        self._shard: dict[str, NDArray[Any]] = {}
        self._written: list[tuple[str, ...]] = []
        self._total_bytes = 0

    def write(self, name: str, array: NDArray[Any]) -> None:
        """Adds a tensor. A uint16 array contains the bits of bfloat16. A very large tensor gets its own file."""
        if self._shard and sum(each.nbytes for each in self._shard.values()) + array.nbytes > self._max_shard_bytes:
            self._write_shard()
        self._shard[name] = array
        self._total_bytes += array.nbytes

    def close(self) -> None:
        """Writes the last shard, names the files, and writes the index if there are several."""
        self._write_shard()
        count = len(self._written)
        if count == 1:
            self._path(0).rename(self._folder / SINGLE_FILE)
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._written):
            file_name = f"model-{index + 1:05}-of-{count:05}.safetensors"
            self._path(index).rename(self._folder / file_name)
            weight_map |= dict.fromkeys(names, file_name)
        content = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._folder / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _write_shard(self) -> None:
        write_safetensors(self._path(len(self._written)), self._shard)
        self._written.append(tuple(self._shard))
        self._shard = {}

    def _path(self, index: int) -> Path:
        return self._folder / f"shard-{index}.partial"
