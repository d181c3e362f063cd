"""Writes the weights of a folder tensor by tensor: every size is known beforehand, so that headers come first."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from agent.weights.tensor_files import INDEX_FILE, SINGLE_FILE

MAX_SHARD_BYTES = 4 * 1024**3
_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "I32": 4, "I64": 8}

Stored = tuple[str, tuple[int, ...]]
"""Type, as in a safetensors file, and shape."""


class FolderWriter:
    """Takes the tensors in the order they were announced in. ``close`` checks that all have come."""

    def __init__(self, folder: Path, tensors: Mapping[str, Stored], max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._folder = folder
        self._tensors = dict(tensors)
        self._shards = _split(self._tensors, max_shard_bytes)
        self._expected = iter([(name, shard) for shard, names in enumerate(self._shards) for name in names])
        self._file: BinaryIO | None = None
        self._open_shard = -1

    def write(self, name: str, array: NDArray[Any]) -> None:
        """The next tensor; bfloat16 as uint16."""
        expected, shard = next(self._expected)
        kind, shape = self._tensors[name]
        assert name == expected, f"{name} comes where {expected} was announced"
        assert array.shape == shape, f"{name} has shape {array.shape}, announced was {shape}"
        assert array.nbytes == _num_bytes((kind, shape)), f"{name} has {array.nbytes} bytes for type {kind}"
        if shard != self._open_shard:
            self._start(shard)
        assert self._file is not None
        self._file.write(np.ascontiguousarray(array).tobytes())

    def close(self) -> None:
        """Finish the last file and write the index, where there are several."""
        left = [name for name, _ in self._expected]
        assert not left, f"{left[:3]} were announced and have not come"
        if self._file is not None:
            self._file.close()
        if len(self._shards) > 1:
            weight_map = {name: self._name_of(shard) for shard, names in enumerate(self._shards) for name in names}
            total = sum(_num_bytes(stored) for stored in self._tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _start(self, shard: int) -> None:
        if self._file is not None:
            self._file.close()
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in self._shards[shard]:
            kind, shape = self._tensors[name]
            begin, end = end, end + _num_bytes((kind, shape))
            header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._file = (self._folder / self._name_of(shard)).open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._open_shard = shard

    def _name_of(self, shard: int) -> str:
        count = len(self._shards)
        return SINGLE_FILE if count == 1 else f"model-{shard + 1:05}-of-{count:05}.safetensors"


def _num_bytes(stored: Stored) -> int:
    return _BYTES[stored[0]] * math.prod(stored[1])


def _split(tensors: Mapping[str, Stored], max_bytes: int) -> list[list[str]]:
    """Names by shard, in order; a tensor larger than a shard has one of its own."""
    shards: list[list[str]] = []
    size = max_bytes + 1
    for name, stored in tensors.items():
        size += _num_bytes(stored)
        if size > max_bytes:
            shards.append([])
            size = _num_bytes(stored)
        shards[-1].append(name)
    return shards
