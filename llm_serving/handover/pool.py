"""Allocates the blocks of the hand-over pool. For each block in use, records the hand-over that uses it and the content
that it must have.

The memory itself belongs to the agents, so this module handles only block numbers. If replicas are on several machines,
each machine has a pool. A hand-over then holds the blocks with the same numbers in all pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llm_serving.handover.header import namespace_digest, pack_header
from llm_serving.kvcache.host_block_pool import HostBlockPool


@dataclass(slots=True, eq=False)
class Lease:
    """The blocks of the pool that one hand-over holds, from their allocation until they are freed."""

    generation: int
    """The number of the hand-over, which is a part of its headers. A server uses each number only once."""
    blocks: list[int]
    hashes: Sequence[bytes]
    """For each block, the hash of its tokens and of all tokens before them."""
    headers: list[bytes]
    """For each block, the header that identifies the expected content. Agents refuse a block with a wrong header."""
    asked_at: float
    """The time, in seconds, at which the prefill replica asked for the blocks, after it had computed the prompt."""
    is_complete: bool = False
    """True if at least one pool got the content of all blocks."""
    holders: set[int] = field(default_factory=set)
    """Indices of the replicas whose pools have the content of all blocks."""
    num_trips: int = 0
    """Number of running transfers that copy these blocks from one pool to another."""
    is_dropped: bool = False
    """True if the hand-over ended while transfers were running. The blocks are freed when the last of them ends."""


class HandOverPool:
    """Allocates the blocks ``0 .. num_blocks - 1`` of the hand-over pool.

    ``namespace`` (``SchedulerLimits.cache_namespace``) identifies the model, its weights and the format of its KV
    cache. All headers contain it.
    """

    def __init__(self, num_blocks: int, namespace: bytes) -> None:
        self.num_blocks = num_blocks
        self._namespace = namespace_digest(namespace)
        self._pool = HostBlockPool(num_blocks)
        self._leases: dict[int, tuple[Lease, int]] = {}
        """For each held block: its lease, and its index in ``Lease.blocks``."""
        self._generation = 0
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        return self._num_free

    def lease(self, hashes: Sequence[bytes], now: float) -> Lease | None:
        """Allocates a block for each of ``hashes``, the hashes of the contents (``Lease.hashes``).

        Returns None if too few blocks are free. ``now`` becomes ``Lease.asked_at``.
        """
        blocks = self._pool.allocate(len(hashes))
        if blocks is None:
            return None
        self._generation += 1
        self._num_free -= len(blocks)
        headers = [pack_header(self._namespace, each, self._generation) for each in hashes]
        lease = Lease(self._generation, blocks, hashes, headers, now)
        self._leases.update((block, (lease, number)) for number, block in enumerate(blocks))
        return lease

    def lease_of(self, blocks: Sequence[int]) -> Lease:
        """Returns the lease to which ``blocks`` belong. They must be held."""
        return self._leases[blocks[0]][0]

    def free(self, lease: Lease) -> None:
        """Frees the blocks of a lease. No step in flight may use them. Raises KeyError if the blocks are not held."""
        for block in lease.blocks:
            del self._leases[block]
        self._num_free += len(lease.blocks)
        self._pool.free(lease.blocks)

    def header(self, block: int) -> bytes:
        """Returns the header that a held block must have."""
        lease, number = self._leases[block]
        return lease.headers[number]

    def renew_headers(self, lease: Lease) -> None:
        """Gives the blocks of a lease new headers. Their present contents then have a wrong header, so that agents
        refuse them.
        """
        self._generation += 1
        lease.generation = self._generation
        lease.headers = [pack_header(self._namespace, each, self._generation) for each in lease.hashes]

    def check_integrity(self, leases: Sequence[Lease]) -> None:
        """Raises AssertionError unless exactly the blocks of ``leases`` are held."""
        self._pool.check_integrity([block for lease in leases for block in lease.blocks])
        if len(self._leases) != self.num_blocks - self._num_free:
            raise AssertionError(f"{len(self._leases)} blocks are leased, {self._num_free} of {self.num_blocks} free")
