"""Copies blocks of a KV cache that is in host memory."""

from __future__ import annotations

from collections.abc import Sequence

from agent.backends.base import CacheLayout
from agent.backends.device import BlockMoves
from agent.kernels import BlockCopies
from agent.step_inputs import Int32Array
from agent.weights.storage import Array, zeros


class HostBlockMoves(BlockMoves):
    """Copies all blocks of a step in one call of a kernel."""

    def __init__(self, arrays: Sequence[Array], host: CacheLayout, pool: Sequence[Array] | None = None) -> None:
        self.pool = [zeros(*host) for _ in arrays] if pool is None else list(pool)
        self.num_host_bytes = sum(array.nbytes for array in self.pool)
        self._copies = BlockCopies(arrays, self.pool)

    def run(self, moves: Int32Array) -> None:
        self._copies.run(moves)
