"""The host blocks of one agent in shared memory. The agent copies blocks between them and its KV cache, and the server
moves them to KV tiers.

The KV cache is a list of arrays, each with the keys or the values of a layer. For each of these arrays, the memory has
an array with the same keys or values of all host blocks. Each array begins at a page. Without KV tiers, the host blocks
are the agent's own memory, and this module is not used.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llm_serving.config import Config
from llm_serving.ipc.alignment import aligned
from llm_serving.ipc.segment import LaidOutSegment
from llm_serving.model.parallel import local_shape

Array = npt.NDArray[Any]


class HostPool(Protocol):
    """The host blocks of a replica, or of some of its agents. They may be in the memory of another machine."""

    @property
    def block_bytes(self) -> int:
        """Size of a block in bytes. It includes the parts of all agents whose blocks are in this pool."""

    @property
    def blocks_at_once(self) -> int:
        """Number of blocks that a caller with many blocks should read or write in one call. The number limits the
        memory of a call. It is 1 if a call for several blocks takes no less time than separate calls for each block.
        """

    def read(self, blocks: Sequence[int]) -> list[bytes]:
        """Returns the contents of ``blocks``, in order.

        The list ends before the first block that could not be read, because its machine could not be reached.
        """

    def write(self, blocks: Sequence[int], contents: Sequence[bytes | memoryview]) -> int:
        """Replaces the contents of ``blocks``, in order. Returns the number of leading blocks that were written.

        This is less than ``len(blocks)`` if the machine with the blocks could not be reached.
        """

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
    """Size in bytes of the part of a block that one array of the KV cache holds."""

    @classmethod
    def of(cls, config: Config, rank: int) -> HostPoolLayout | None:
        """Returns the layout for the agent ``rank`` of a replica. None without KV tiers.

        ``config`` describes the whole model, not only the agent's part.
        """
        if not config.kv_tier_config.host_blocks:
            return None
        shape = local_shape(config.shape, config.shard(rank))
        block_bytes = config.kv_bytes_of(shape) * config.pa_config.block_size
        return cls(shape.num_cache_arrays, config.num_pool_blocks, block_bytes // shape.num_cache_arrays)

    @property
    def block_bytes(self) -> int:
        """Size of a block in bytes: the sum of its parts in all arrays."""
        return self.num_arrays * self.part_bytes

    @property
    def array_bytes(self) -> int:
        """Number of bytes from the beginning of an array to the beginning of the next array."""
        return aligned(self.num_blocks * self.part_bytes, mmap.PAGESIZE)

    @property
    def num_bytes(self) -> int:
        return self.num_arrays * self.array_bytes


class HostPoolMemory(LaidOutSegment[HostPoolLayout]):
    """The mapped host blocks of an agent. The server creates and unlinks them; the agent attaches to them."""

    KIND = "host pool"
    is_usable = True
    blocks_at_once = 1

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

    def read(self, blocks: Sequence[int]) -> list[bytes]:
        """Returns the content of each block: its part of each array, in order."""
        return [self._blocks[:, block].tobytes() for block in blocks]

    def write(self, blocks: Sequence[int], contents: Sequence[bytes | memoryview]) -> int:
        """Replaces the contents of blocks. Returns their number, because the memory is on this machine."""
        for block, content in zip(blocks, contents, strict=True):
            self.copy_in(block, memoryview(content))
        return len(blocks)

    def copy_in(self, block: int, content: memoryview) -> None:
        """Replaces the content of a block."""
        self._blocks[:, block] = np.frombuffer(content, np.uint8).reshape(-1, self.layout.part_bytes)

    def copy_out(self, block: int, content: memoryview) -> None:
        """Copies the content of a block to ``content``, which has ``block_bytes`` bytes and is writable."""
        np.frombuffer(content, np.uint8).reshape(-1, self.layout.part_bytes)[:] = self._blocks[:, block]

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
        self.blocks_at_once = min(part.blocks_at_once for part in parts)

    def read(self, blocks: Sequence[int]) -> list[bytes]:
        return [b"".join(parts) for parts in zip(*(part.read(blocks) for part in self._parts), strict=False)]

    def write(self, blocks: Sequence[int], contents: Sequence[bytes | memoryview]) -> int:
        start, counts = 0, []
        for part in self._parts:
            end = start + part.block_bytes
            counts.append(part.write(blocks, [content[start:end] for content in contents]))
            start = end
        return min(counts)

    @property
    def is_usable(self) -> bool | None:
        usable = [part.is_usable for part in self._parts]
        return False if False in usable else None if None in usable else True

    def expect_weights(self, digest: str, note: Callable[[str], None]) -> None:
        for part in self._parts:
            part.expect_weights(digest, note)
