"""The host blocks of one agent in shared memory. The agent copies blocks between them and its KV cache, and the server
moves them to KV tiers.

The KV cache is a list of arrays, each with the keys or the values of a layer. The memory has one array for each of
them, with these keys or values of all host blocks. Each array begins at a page. Without KV tiers, the host blocks are
the agent's own memory, and this module is not used.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llm_serving.config import Config
from llm_serving.ipc.segment import LaidOutSegment
from llm_serving.model.parallel import local_shape

Array = npt.NDArray[Any]


class HostPool(Protocol):
    """The host blocks of a replica, or of some of its agents. They may be in the memory of another machine."""

    @property
    def block_bytes(self) -> int:
        """Size of a block in bytes. It includes the parts of all agents whose blocks are in this pool."""

    def read(self, block: int) -> bytes | None:
        """Returns the content of a block. None if the machine with the blocks cannot be reached."""

    def write(self, block: int, content: bytes) -> bool:
        """Replaces the content of a block. Returns False if the machine with the blocks cannot be reached."""

    @property
    def is_usable(self) -> bool | None:
        """Whether blocks may be read and written. None until the weights on the agents' machine have been compared.

        False if that machine has other weights than the server, or if it cannot be used. Any thread may read this
        property. Reading it never waits.
        """

    def expect_weights(self, digest: str, note: Callable[[str], None]) -> None:
        """Starts to compare the weights on the agents' machine with ``digest``, the digest of the server's weights.

        Returns immediately. Another thread reports the result to ``note``: an empty text if the blocks can be used,
        otherwise the reason why they cannot. A second call of this method has no effect.
        """


@dataclass(frozen=True, slots=True)
class HostPoolLayout:
    """The sizes of an agent's host blocks."""

    num_arrays: int
    num_blocks: int
    part_bytes: int
    """Bytes of one block in one array."""

    @classmethod
    def of(cls, config: Config, rank: int) -> HostPoolLayout | None:
        """Returns the layout for the agent ``rank`` of a replica. None without KV tiers.

        ``config`` describes the whole model, not only the agent's part.
        """
        if not config.kv_tier_config.host_blocks:
            return None
        shape = local_shape(config.shape, config.shard(rank))
        num_arrays = shape.num_layers * (2 if shape.latent is None else 1)
        block_bytes = config.kv_bytes_of(shape) * config.pa_config.block_size
        return cls(num_arrays, config.num_pool_blocks, block_bytes // num_arrays)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all arrays."""
        return self.num_arrays * self.part_bytes

    @property
    def array_bytes(self) -> int:
        """Number of bytes from the beginning of an array to the beginning of the next array."""
        return -(-self.num_blocks * self.part_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def num_bytes(self) -> int:
        return self.num_arrays * self.array_bytes


class HostPoolMemory(LaidOutSegment[HostPoolLayout]):
    """The mapped host blocks of an agent. The server creates and unlinks them; the agent attaches to them."""

    KIND = "host pool"
    is_usable = True

    def _make_views(self, mapping: mmap.mmap) -> None:
        layout = self.layout
        self._blocks: Array = np.ndarray(
            (layout.num_arrays, layout.num_blocks, layout.part_bytes),
            np.uint8,
            mapping,
            strides=(layout.array_bytes, layout.part_bytes, 1),
        )

    @property
    def arrays(self) -> list[Array]:
        """One array of bytes for each array of the KV cache, each contiguous: [blocks, part_bytes]."""
        return list(self._blocks)

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    def read(self, block: int) -> bytes:
        """Returns the content of a block: its part of each array, in order."""
        return self._blocks[:, block].tobytes()

    def write(self, block: int, content: bytes) -> bool:
        """Replaces the content of a block. Returns True, because the memory is on this machine."""
        self._blocks[:, block] = np.frombuffer(content, np.uint8).reshape(-1, self.layout.part_bytes)
        return True

    def expect_weights(self, digest: str, note: Callable[[str], None]) -> None:
        """Does nothing. Agents on this machine read the same files as the server, so their weights are the same."""


def pool_of(parts: Sequence[HostPool]) -> HostPool:
    """Returns the host blocks of a replica as one pool. ``parts`` has the parts of its agents, in order of rank."""
    return parts[0] if len(parts) == 1 else _JoinedPool(parts)


class _JoinedPool:
    """The host blocks of several agents. A block consists of the parts of all agents, in order of rank."""

    def __init__(self, parts: Sequence[HostPool]) -> None:
        self._parts = parts
        self.block_bytes = sum(part.block_bytes for part in parts)

    def read(self, block: int) -> bytes | None:
        contents = [part.read(block) for part in self._parts]
        return None if None in contents else b"".join(content for content in contents if content is not None)

    def write(self, block: int, content: bytes) -> bool:
        start, written = 0, []
        for part in self._parts:
            written.append(part.write(block, content[start : start + part.block_bytes]))
            start += part.block_bytes
        return all(written)

    @property
    def is_usable(self) -> bool | None:
        usable = [part.is_usable for part in self._parts]
        return False if False in usable else None if None in usable else True

    def expect_weights(self, digest: str, note: Callable[[str], None]) -> None:
        for part in self._parts:
            part.expect_weights(digest, note)
